"""Images of which the process node has the content: vLLM's environment, and the connector of this checkout."""

from pathlib import Path

import pytest

from prfaas.errors import ConfigError
from prfaas_sandbox import vllm
from prfaas_sandbox.cache.entries import CACHE_VARIABLE, COMPLETE
from prfaas_sandbox.network import HUB, join_pod, leave_pod
from prfaas_sandbox.node import images


@pytest.mark.parametrize(
    "image",
    [
        "vllm/vllm-openai",
        "vllm/vllm-openai:v0.32.0",
        "docker.io/vllm/vllm-openai:v0.32.0",
        "registry.local:5000/vllm/vllm-openai:v0.32.0@sha256:0123",
    ],
)
def test_an_image_is_known_by_its_name(image: str):
    assert images.repository_of(image) == images.VLLM_IMAGE
    assert images.binds_everywhere(image)


@pytest.mark.parametrize("image", ["", "none", "prfaas/worker:0.1.0", "other/vllm:1"])
def test_all_other_images_are_this_checkouts_programs(image: str, tmp_path: Path):
    assert images.content(image, tmp_path) == images.ImageContent()
    assert not images.binds_everywhere(image)


def test_vllm_is_the_one_of_its_own_environment_with_the_small_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    with pytest.raises(ConfigError, match="prfaas sandbox vllm"):
        images.content("vllm/vllm-openai:v0.32.0", tmp_path)
    folder = vllm.environment_folder()
    folder.mkdir()
    (folder / COMPLETE).touch()
    found = images.content("vllm/vllm-openai:v0.32.0", tmp_path)
    assert found.env["PATH"].split(":")[0] == f"{folder}/bin"
    (model,) = found.mounts
    assert model.path == "/models/qwen3-next-tiny"
    assert (Path(model.source) / "config.json").is_file()
    assert found.folders == {str(folder)}


def test_the_connectors_image_has_the_packages_that_vllm_imports(tmp_path: Path):
    (mount,) = images.content("prfaas/vllm-connector:0.1.0", tmp_path).mounts
    assert (mount.path, mount.read_only) == ("/prfaas-vllm", True)
    assert {each.name for each in Path(mount.source).iterdir()} == {"prfaas", "prfaas_transfer", "prfaas_vllm"}


def test_a_pod_with_its_own_network_leaves_no_device():
    joined, left = join_pod(Path("/n"), HUB, "10.244.3.17"), leave_pod(Path("/n"), "10.244.3.17")
    (added,) = [command for command in joined if command[:3] == ["ip", "link", "add"]]
    assert left[0] == ["ip", "link", "delete", added[3]]
    assert len(added[3]) < 16  # the kernel's bound
