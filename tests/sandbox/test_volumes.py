"""A volume's folder holds exactly what its sources say, each file whole at any moment."""

import pytest

from prfaas.errors import ConfigError
from prfaas_sandbox.node.pod import unsupported
from prfaas_sandbox.node.variables import ConfigSource
from prfaas_sandbox.node.volumes import choose_items, decode, unsupported_volumes, write_files

SOURCE = ConfigSource("configmaps", "conf")


def test_files_are_written_replaced_and_removed(tmp_path):
    write_files(tmp_path, {"a": (b"1", 0o644), "deep/b": (b"2", 0o400)})
    assert (tmp_path / "deep" / "b").read_bytes() == b"2"
    assert (tmp_path / "deep" / "b").stat().st_mode & 0o777 == 0o400
    held = (tmp_path / "a").open("rb")
    with held:
        write_files(tmp_path, {"a": (b"longer", 0o644)})
        assert held.read() == b"1"  # a reader of the old file reads all of it
    assert {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()} == {"a"}
    assert (tmp_path / "a").read_bytes() == b"longer"


def test_keeps_an_unchanged_file(tmp_path):
    write_files(tmp_path, {"a": (b"1", 0o644)})
    before = (tmp_path / "a").stat().st_ino
    write_files(tmp_path, {"a": (b"1", 0o644)})
    assert (tmp_path / "a").stat().st_ino == before


def test_configmaps_hold_text_and_bytes_secrets_bytes():
    assert decode({"data": {"t": "ä"}, "binaryData": {"b": "/wA="}}, "configmaps") == {
        "t": "ä".encode(),
        "b": b"\xff\x00",
    }
    assert decode({"data": {"s": "eA=="}}, "secrets") == {"s": b"x"}
    assert decode({}, "secrets") == {}


def test_items_choose_and_rename():
    found = {"a": b"1", "b": b"2"}
    assert choose_items(SOURCE, found, {}, 0o644) == {"a": (b"1", 0o644), "b": (b"2", 0o644)}
    chosen = choose_items(SOURCE, found, {"items": [{"key": "b", "path": "x/y", "mode": 0o600}]}, 0o644)
    assert chosen == {"x/y": (b"2", 0o600)}
    with pytest.raises(ConfigError, match="configmaps 'conf' has no key 'c'"):
        choose_items(SOURCE, found, {"items": [{"key": "c", "path": "c"}]}, 0o644)


def test_what_the_node_lacks_is_listed():
    spec = {
        "initContainers": [{"name": "first", "restartPolicy": "Always"}],
        "containers": [{"name": "c", "livenessProbe": {"grpc": {"port": 1}}}],
        "volumes": [{"name": "ok", "emptyDir": {}}, {"name": "disk", "persistentVolumeClaim": {"claimName": "x"}}],
    }
    assert unsupported_volumes({"spec": spec}) == ["disk (persistentVolumeClaim)"]
    assert unsupported({"spec": spec}).endswith(
        "sidecars first; volumes disk (persistentVolumeClaim); gRPC probes of c"
    )
    assert unsupported({"spec": {"containers": [{"name": "c"}]}}) == ""
