"""A vLLM for pods on kind: an image without vLLM, and the vLLM of `prfaas sandbox vllm` in a volume.

vLLM with all that it needs has 6 GB, too much to go into an image and from there into two nodes. The nodes mount this
machine's cache of programs instead. Pods get the folder by a PersistentVolumeClaim, as users give them models. The
image has Debian's Python of the same version, and is to the operator like any image of vLLM.
"""

import sys
from typing import Any, Final

from prfaas.kube.session import Object
from prfaas_sandbox import vllm
from prfaas_sandbox.kind.clusters import CACHE_PATH
from prfaas_sandbox.kind.docker import has_image
from prfaas_sandbox.kind.images import ImageBuilder, base_image, build_command, digest, docker_client

SUITES: Final = {(3, 11): "bookworm", (3, 13): "trixie"}
"""Releases of Debian by the version of their Python."""
RECIPE: Final = "tools/kind/vllm.Dockerfile"
SOURCES: Final = (RECIPE, "worker/prfaas_worker/assets/qwen3-next-tiny")
PATH: Final = "/opt/vllm"
CLAIM: Final = "vllm"


def why_not() -> str:
    """Return why no vLLM can run on kind here, with the cure; empty if one can."""
    if sys.version_info[:2] not in SUITES:
        mine, known = sys.version_info, " or ".join(f"{major}.{minor}" for major, minor in SUITES)
        return f"this is Python {mine.major}.{mine.minor}, and images here have {known}: make .venv with one of these"
    if not vllm.is_installed():
        return "vLLM is not installed on this machine: run `prfaas sandbox vllm` (6 GB)"
    return ""


async def vllm_image(builder: ImageBuilder) -> str:
    """Return the image that pools of vLLM name; it needs `template` with the volume."""
    for noted in (vllm.environment_folder() / "cache").rglob("*"):
        noted.chmod(noted.stat().st_mode | 0o444)  # vLLM itself lets nobody else read its notes
    root = builder.layout.repository
    base = await base_image(builder, SUITES[sys.version_info[:2]])
    reference = f"prfaas/kind-vllm:{digest(root, SOURCES, base)}"
    if not await has_image(reference):
        words = ["build", "-t", reference, "--build-arg", f"BASE={base}", "-f", root / RECIPE, root]
        await builder.run(build_command([await docker_client(), *words]), reference)
    return reference


def template(pool: Object) -> Object:
    """Return a pool's `template` with vLLM mounted from the claim."""
    pool_template: dict[str, Any] = pool["spec"].get("template", {})
    volume = {"name": CLAIM, "persistentVolumeClaim": {"claimName": CLAIM}}
    return {
        **pool_template,
        "volumes": [*pool_template.get("volumes", ()), volume],
        "volumeMounts": [*pool_template.get("volumeMounts", ()), {"name": CLAIM, "mountPath": PATH}],
    }


def claim(namespace: str) -> list[Object]:
    """Return the claim in a namespace, and the node's folder as the volume that it binds."""
    path = f"{CACHE_PATH}/{vllm.environment_folder().name}"
    common = {"accessModes": ["ReadOnlyMany"], "storageClassName": ""}
    volume = {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": CLAIM},
        "spec": {
            **common,
            "capacity": {"storage": "8Gi"},
            "claimRef": {"namespace": namespace, "name": CLAIM},
            "hostPath": {"path": path, "type": "Directory"},
        },
    }
    wanted = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": CLAIM, "namespace": namespace},
        "spec": {**common, "volumeName": CLAIM, "resources": {"requests": {"storage": "8Gi"}}},
    }
    return [volume, wanted]
