"""Images of which the process node has the content: vLLM's, and the one that brings our connector into it.

No image is pulled here. Our own programs are in this checkout's environment, whatever their image is called. vLLM is in
its own environment (see `prfaas_sandbox.vllm`), as an image for CPUs that also holds the small model which ships
with prfaas. Our connector is this checkout's.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final, NamedTuple

from prfaas.errors import ConfigError
from prfaas_sandbox import vllm
from prfaas_sandbox.node.process import Mount

SYSTEM_PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
VLLM_IMAGE: Final = "vllm/vllm-openai"
MODEL: Final = "qwen3-next-tiny"


class ImageContent(NamedTuple):
    """What a container gets of its image: variables and files.

    `folders` are those of its programs, at the same path outside.
    """

    env: Mapping[str, str] = MappingProxyType({})
    mounts: tuple[Mount, ...] = ()
    folders: frozenset[str] = frozenset()


def content(image: str, scratch: Path) -> ImageContent:
    """Return an image's content, nothing for other images; `scratch` is a folder of the node.

    Raises ConfigError if vLLM is not installed.
    """
    if vllm.is_connector(image):
        return ImageContent(mounts=(Mount(vllm.CONNECTOR_PATH, str(vllm.connector_folder(scratch)), read_only=True),))
    if repository_of(image) != VLLM_IMAGE:
        return ImageContent()
    folder = vllm.environment_folder()
    if not vllm.is_installed():
        raise ConfigError(f"image {image} stands for a vLLM that is not installed: run `prfaas sandbox vllm`")
    env = {
        "PATH": f"{folder}/bin:{SYSTEM_PATH}",
        "VLLM_TARGET_DEVICE": "cpu",
        # To learn what a model's class can do, vLLM imports itself in one more process, unless it has noted it.
        "VLLM_CACHE_ROOT": f"{folder}/cache",
    }
    model = Mount(f"/models/{MODEL}", str(vllm.ROOT / "worker/prfaas_worker/assets" / MODEL), read_only=True)
    return ImageContent(env, (model,), frozenset({str(folder.resolve())}))


def binds_everywhere(image: str) -> bool:
    """Return whether the image's program takes ports of all addresses, so that its pod needs its own network.

    Other pods share their cluster's and take ports of their own addresses alone. vLLM publishes cache events at `*`.
    """
    return repository_of(image) == VLLM_IMAGE


def repository_of(image: str) -> str:
    """Return an image's name without registry, tag and digest."""
    return "/".join(re.sub(r"(:[^/:@]*)?(@.*)?$", "", image).split("/")[-2:])
