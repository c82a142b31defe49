"""Files, tags, and the errors of a machine without Docker: all of kind that needs no Docker."""

import ipaddress
import os
import sys
from pathlib import Path

import pytest
import yaml

from prfaas.api.template import PodTemplate
from prfaas.errors import BadInputError, ConfigError
from prfaas_sandbox.demo.install import example, operator_values, repository_root
from prfaas_sandbox.environment import Images
from prfaas_sandbox.kind import cli, docker, images, vllm
from prfaas_sandbox.kind.clusters import CACHE_PATH, configuration, parse_rate
from prfaas_sandbox.kind.docker import daemon_answers, ensure_daemon, lacks_resource_capability, our_daemon, stop_daemon
from prfaas_sandbox.kind.environment import down
from prfaas_sandbox.kind.images import NodeImage, digest
from prfaas_sandbox.kind.layout import NODE_PORTS, PROMETHEUS_NODE_PORT, Layout
from prfaas_sandbox.vllm import environment_folder

pytestmark = pytest.mark.kind

IMAGES = Images("prfaas/operator:1", "prfaas/gateway:2", "prfaas/worker:3", "prfaas/vllm-connector:4", "prfaas/vllm:5")


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    return Layout(repository_root(), tmp_path / "state", "prfaas-test")


def program(folder: Path, name: str, text: str) -> None:
    """Put a shell script where PATH finds it."""
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Leave nothing on PATH but a new folder."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    return folder


def test_clusters_share_no_range_and_the_hub_maps_its_ports_to_this_machine_alone(layout: Layout):
    used = []
    for cluster in layout.clusters:
        networking = yaml.safe_load(cluster.config.read_text())["networking"]
        assert networking["podSubnet"] == cluster.network.range
        used += [ipaddress.ip_network(networking[key]) for key in ("podSubnet", "serviceSubnet")]
    assert not any(one.overlaps(other) for one in used for other in used if one is not other)
    mappings = yaml.safe_load(layout.hub.config.read_text())["nodes"][0]["extraPortMappings"]
    assert [mapping["containerPort"] for mapping in mappings] == [*NODE_PORTS, PROMETHEUS_NODE_PORT]
    assert all(mapping["hostPort"] == 0 and mapping["listenAddress"] == "127.0.0.1" for mapping in mappings)


def test_only_our_own_node_image_brings_a_network_for_pods(layout: Layout):
    text = layout.member.config.read_text()
    for published in (True, False):
        document = yaml.safe_load(configuration(text, NodeImage("node", published), {"/here": layout.images}))
        assert document["networking"].get("disableDefaultCNI", False) is not published
        (mount,) = document["nodes"][0]["extraMounts"]
        assert mount == {"hostPath": str(layout.images), "containerPath": "/here", "readOnly": True}


def test_a_tag_changes_with_content_and_name_and_with_nothing_else(tmp_path: Path):
    (tmp_path / "part").mkdir()
    (tmp_path / "part" / "a").write_text("1")
    seen = [digest(tmp_path, ["part"])]
    (tmp_path / "part" / "__pycache__").mkdir()
    (tmp_path / "part" / "__pycache__" / "a.pyc").write_text("x")
    (tmp_path / "elsewhere").write_text("2")
    assert digest(tmp_path, ["part"]) == seen[0]
    seen.append(digest(tmp_path, ["part"], "base:1"))
    (tmp_path / "part" / "a").write_text("2")
    seen.append(digest(tmp_path, ["part"]))
    (tmp_path / "part" / "a").rename(tmp_path / "part" / "b")
    seen.append(digest(tmp_path, ["part"]))
    assert len(set(seen)) == len(seen)


def test_everything_that_images_are_built_from_is_there(layout: Layout):
    assert all((layout.tools / part).exists() for part in (*images.NODE_SOURCES, *images.BASE_SOURCES))
    assert all((layout.repository / part).exists() for part in (*images.PRODUCT_SOURCES, *vllm.SOURCES))
    copied = [line.split()[1:-1] for line in (layout.repository / "Dockerfile").read_text().splitlines()
              if line.startswith("COPY ") and "--from" not in line]  # fmt: skip
    assert {name.rstrip("/") for names in copied for name in names} <= set(images.PRODUCT_SOURCES)


def test_pools_of_vllm_get_its_image_and_vllm_from_a_claim_that_binds_the_folder_of_this_checkouts():
    text = (repository_root() / "examples" / "two-clusters-vllm.yaml").read_text()
    for pool in (each for each in yaml.safe_load_all(example(text, IMAGES)) if each["kind"] != "PrfaaSPolicy"):
        assert pool["spec"]["engine"]["image"] == IMAGES.vllm
        template = vllm.template(pool)
        assert template["env"] == pool["spec"]["template"]["env"]
        PodTemplate.model_validate(template)
        (mount,), (volume,) = template["volumeMounts"], template["volumes"]
        assert (mount["name"], mount["mountPath"]) == (volume["name"], vllm.PATH)
    folder, wanted = vllm.claim("here")
    assert volume["persistentVolumeClaim"]["claimName"] == wanted["metadata"]["name"]
    assert wanted["spec"]["volumeName"] == folder["metadata"]["name"]
    assert folder["spec"]["hostPath"]["path"] == f"{CACHE_PATH}/{environment_folder().name}"


def test_an_unknown_python_and_a_missing_vllm_are_reported_with_the_cure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("PRFAAS_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(vllm, "SUITES", {sys.version_info[:2]: "bookworm"})
    assert "run `prfaas sandbox vllm`" in vllm.why_not()
    monkeypatch.setattr(vllm, "SUITES", {(3, 9): "bullseye"})
    assert "images here have 3.9" in vllm.why_not()


def test_helm_gets_the_operators_image_in_two_values_and_the_others_in_one():
    values = operator_values(
        Images("registry.example:5000/operator:7", "gateway:9", "worker:3", "registry.example:5000/connector:8")
    )
    assert values == [
        "--set", "operator.image.repository=registry.example:5000/operator", "--set", "operator.image.tag=7",
        "--set", "gatewayImage=gateway:9", "--set", "workerImage=worker:3",
        "--set", "connectorImage=registry.example:5000/connector:8",
    ]  # fmt: skip
    assert operator_values(None) == []


@pytest.mark.parametrize(
    ("shown", "mbps"),
    [
        ("qdisc tbf 8001: root refcnt 9 rate 100Mbit burst 250000b lat 50ms", 100.0),
        ("qdisc tbf 8001: root rate 1500Kbit burst 8Kb lat 50ms", 1.5),
        ("qdisc tbf 8001: root rate 2Gbit burst 256Kb lat 50ms", 2000.0),
        ("qdisc noqueue 0: root refcnt 2", 0.0),
    ],
)
def test_the_rate_is_read_from_what_tc_shows(shown: str, mbps: float):
    assert parse_rate(shown) == pytest.approx(mbps)


def test_a_rate_that_no_link_has_is_refused_before_anything_is_done(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cli, "layout", lambda: pytest.fail("something was done before the rate was checked"))
    with pytest.raises(BadInputError, match="a link of -5"):
        cli.up(link_mbps=-5.0)


async def test_without_docker_the_reader_learns_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    only(tmp_path, monkeypatch)
    with pytest.raises(ConfigError, match=r"Docker is not installed: .*apt-get install docker.io"):
        await daemon_answers()


async def test_distinguishes_a_closed_socket_from_a_daemon_that_does_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    folder = only(tmp_path, monkeypatch)
    program(folder, "docker", "echo 'Cannot connect to the Docker daemon' >&2; exit 1")
    assert not await daemon_answers()
    program(folder, "docker", "echo 'permission denied while trying to connect' >&2; exit 1")
    with pytest.raises(ConfigError, match="denies access"):
        await daemon_answers()


async def test_a_daemon_that_is_not_ours_to_start_is_named_with_how_to_start_it(
    layout: Layout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    program(only(tmp_path, monkeypatch), "docker", "echo 'Cannot connect' >&2; exit 1")
    with pytest.raises(ConfigError, match=r"does not run: start it .*systemctl start docker"):
        await ensure_daemon(layout, print)


async def test_skips_a_client_that_cannot_build_for_one_that_can(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = only(tmp_path, monkeypatch)
    program(folder, "docker", '[ "$1" = version ] && echo 28.2.2 || exit 1')
    with pytest.raises(ConfigError, match="docker-buildx"):
        await images.docker_client()
    other = tmp_path / "other"
    other.mkdir()
    program(other, "docker", '[ "$1" = version ] && echo 20.10.24')
    monkeypatch.setenv("PATH", f"{folder}:{other}")
    assert await images.docker_client() == str(other / "docker")
    program(folder, "docker", "echo 28.2.2")
    assert await images.docker_client() == str(folder / "docker")


@pytest.mark.skipif(os.geteuid() != 0, reason="asks what root lacks")
def test_recognizes_a_root_without_the_capability_by_its_mask():
    assert lacks_resource_capability("Name:\tx\nCapEff:\t000001fffeffffff\n")
    assert not lacks_resource_capability("Name:\tx\nCapEff:\t000001ffffffffff\n")


def test_ends_no_other_process_that_has_the_same_id_by_now(layout: Layout):
    layout.state.mkdir()
    assert our_daemon(layout) is None
    layout.daemon_pid.write_text(str(os.getpid()))
    assert our_daemon(layout) is None
    assert not stop_daemon(layout)


async def test_taking_down_what_is_not_there_removes_the_folder_and_is_no_error(
    layout: Layout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("PRFAAS_CACHE_DIR", str(tmp_path / "cache"))
    left = tmp_path / "cache" / "kind-build-killed"
    left.mkdir(parents=True)
    layout.logs.mkdir(parents=True)
    program(only(tmp_path, monkeypatch), "docker", "echo 'Cannot connect' >&2; exit 1")
    await down(layout)
    await down(layout)
    assert not layout.state.exists()
    assert not left.exists()
    with pytest.raises(ConfigError, match="images cannot be removed"):
        await down(layout, purge=True)


async def test_what_is_removed_is_chosen_by_label_alone(monkeypatch: pytest.MonkeyPatch):
    calls: list[tuple[str, ...]] = []

    async def record(*words: str) -> str:
        calls.append(words)
        return "one\ntwo" if words[0] == "ps" else ""

    monkeypatch.setattr(docker, "docker", record)
    await docker.remove_all(("ps -aq", "rm -fv"), "owner=us")
    await docker.remove_all(("network ls -q", "network rm"), "owner=us")
    assert calls == [
        ("ps", "-aq", "--filter", "label=owner=us"), ("rm", "-fv", "one", "two"),
        ("network", "ls", "-q", "--filter", "label=owner=us"),
    ]  # fmt: skip


def test_the_newest_images_of_each_kind_are_kept_and_what_others_built_is_not_ours():
    workers = ["prfaas/worker:kind-3", "prfaas/worker:0.1.0", "prfaas/worker:kind-2", "prfaas/worker:kind-1"]
    assert images.built_before(workers, 2) == ["prfaas/worker:kind-1"]
    assert images.built_before(workers, 0) == ["prfaas/worker:kind-3", "prfaas/worker:kind-2", "prfaas/worker:kind-1"]
    assert images.built_before(["prfaas/kind-node:b", "prfaas/kind-node:a"], 1) == ["prfaas/kind-node:a"]
    assert images.built_before(workers, 2, {"prfaas/worker:kind-1"}) == [], "an old one is in use again"
