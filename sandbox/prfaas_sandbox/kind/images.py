"""The images of a pair of kind clusters: the node, what prfaas runs in, prfaas's own three, and Prometheus.

Where images can be pulled, the node is kind's published one and the base Debian's; else both are built from Debian
packages and Go modules. Everything above them is built the same way in both cases.
"""

import asyncio
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from prfaas.errors import ConfigError, PeerError
from prfaas_sandbox.build import ensure_modules, module_folder
from prfaas_sandbox.commands import Command, run
from prfaas_sandbox.kind.docker import docker, has_image, inspect
from prfaas_sandbox.kind.workshop import BUILD_TIMEOUT_SECONDS, Workshop, digest
from prfaas_sandbox.place import Images
from prfaas_sandbox.tools import COREDNS, KIND, NODE, PROMETHEUS, pinned_version

# The newest of kind 0.33's images whose kubelet still starts under cgroup v1; a tag alone may be another release's.
PUBLISHED_NODE = "kindest/node:v1.34.11@sha256:44e222ee2132dab25ff87301682f89eb82c7880ea3a1bf543bfe9708fd08d67d"
PUBLISHED_BASE = "debian:trixie-slim"
NODE_SOURCES = ("kind", "node", "coredns")
BASE_SOURCES = ("kind/base-image.sh", "kind/debian.sh", "kind/base.Dockerfile")
PRODUCT_SOURCES = (
    "Dockerfile", "pyproject.toml", "requirements.lock.txt", "requirements-uv.lock.txt", "README.md", "LICENSE",
    "core", "operator", "gateway", "scheduler", "worker", "sandbox",
)  # fmt: skip
REPOSITORIES = ("prfaas/kind-node", "prfaas/kind-base", "prfaas/kind-prometheus")
TARGETS = ("operator", "gateway", "worker")


@dataclass(frozen=True)
class NodeImage:
    """What kind's nodes run.

    Args:
        reference: the image.
        published: whether it is kind's own, which brings a network for pods; ours has it built in.

    """

    reference: str
    published: bool


async def node_image(workshop: Workshop) -> NodeImage:
    """Return the node image: ours if it is here, else the published one, else ours built now."""
    tools = workshop.layout.tools
    version = f"v{pinned_version((tools / NODE.name / 'go.mod').read_text(), NODE.pin)}"
    own = f"prfaas/kind-node:{version}-{digest(tools, NODE_SOURCES)}"
    if await has_image(own):
        return NodeImage(own, published=False)
    if await has_image(PUBLISHED_NODE) or await workshop.pulls(PUBLISHED_NODE):
        return NodeImage(PUBLISHED_NODE, published=True)
    workshop.report("no image can be pulled here: the node image is built, about 10 minutes the first time")
    programs = await asyncio.to_thread(ensure_modules, (NODE, COREDNS), workshop.report)
    files = await asyncio.to_thread(module_folder, KIND, KIND.pin, workshop.report)
    environment = {
        **{name.upper(): str(programs[name]) for name in ("kube", "coredns", "pause")},
        "KIND_FILES": str(files / "images" / "base" / "files"),
        "VERSION": version,
        "OWNER": workshop.layout.label,
    }
    await workshop.script("node-image.sh", own, environment)
    return NodeImage(own, published=False)


async def base_image(workshop: Workshop) -> str:
    """Return the image below prfaas's own: Debian trixie with its Python."""
    tools = workshop.layout.tools
    base = f"prfaas/kind-base:trixie-{digest(tools, BASE_SOURCES)}"
    if await has_image(base):
        return base
    if await workshop.pulls(PUBLISHED_BASE):
        source = tools / "kind"
        words = [await builder(), "build", "-q", "-t", base, "-f", source / "base.Dockerfile", source]
        await workshop.run(_build(words), base)
    else:
        await workshop.script("base-image.sh", base)
    return base


async def product_images(workshop: Workshop) -> Images:
    """Return prfaas's three images, built from this checkout."""
    root = workshop.layout.repository
    base = await base_image(workshop)
    tag = digest(root, PRODUCT_SOURCES, base)
    references = {target: f"prfaas/{target}:kind-{tag}" for target in TARGETS}
    for target, reference in references.items():
        if not await has_image(reference):
            words = [await builder(), "build", "--target", target, "-t", reference]
            words += ["--build-arg", f"BASE={base}", "--build-arg", "TORCH=debian", root]
            await workshop.run(_build(words), reference)
    sizes = await inspect("{{.Size}}", *references.values())
    told = (f"{target} {int(size) / 1e6:.0f} MB" for target, size in zip(references, sizes, strict=True))
    workshop.report(f"images, unpacked: {', '.join(told)}")
    return Images(**references)


async def prometheus_image(workshop: Workshop) -> str:
    """Return an image with nothing but our Prometheus in it."""
    program = (await asyncio.to_thread(ensure_modules, (PROMETHEUS,), workshop.report))["prometheus"]
    reference = f"prfaas/kind-prometheus:{program.parent.name.rpartition('-')[2]}"
    if not await has_image(reference):
        recipe = workshop.layout.tools / "kind" / "prometheus.Dockerfile"
        words = [await builder(), "build", "-q", "-t", reference, "-f", recipe, program.parent]
        await workshop.run(_build(words), reference)
    return reference


def _build(words: Sequence[str | Path]) -> Command:
    environment = {"DOCKER_BUILDKIT": "1", "BUILDKIT_PROGRESS": "plain"}
    return Command(words, f"docker build of {words[-1]}", environment, timeout_seconds=BUILD_TIMEOUT_SECONDS)


async def builder() -> str:
    """Return a docker client on PATH that can build with BuildKit; newer ones need their plugin buildx for that.

    Raises:
        ConfigError: there is none.

    """
    seen: set[Path] = set()
    for folder in os.get_exec_path():
        client = Path(folder) / "docker"
        if client.is_file() and client.resolve() not in seen:
            seen.add(client.resolve())
            if await _has_buildkit(client):
                return str(client)
    raise ConfigError("Docker's client here cannot use BuildKit: install its plugin (package docker-buildx)")


async def _has_buildkit(client: Path) -> bool:
    shown = await run(Command([client, "version", "--format", "{{.Client.Version}}"], timeout_seconds=60.0))
    if int(shown.split(".")[0]) < 23:
        return True
    try:
        await run(Command([client, "buildx", "version"], timeout_seconds=60.0))
    except PeerError:
        return False
    return True


async def remove_images() -> None:
    """Remove every image that this package has made."""
    for repository in (*REPOSITORIES, *(f"prfaas/{target}" for target in TARGETS)):
        listed = await docker("images", "--format", "{{.Repository}}:{{.Tag}}", repository)
        own = [line for line in listed.splitlines() if repository in REPOSITORIES or ":kind-" in line]
        if own:
            await docker("rmi", "-f", *own)
