"""Builds the images of a pair of kind clusters: the node, the base, prfaas's own, and Prometheus.

If images can be pulled, the node is kind's published one and the base is Debian's. Else both are built from Debian
packages and Go modules. The images above them are built the same way in both cases. Each tag has a hash of the image's
inputs, so that no image is built twice.
"""

import asyncio
import hashlib
import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Collection, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from prfaas.errors import ConfigError, PeerError
from prfaas_sandbox.cache.entries import cache_folder
from prfaas_sandbox.environment import Images
from prfaas_sandbox.kind.docker import INSTALL_ADVICE, docker, free_bytes, has_image, inspect, succeeds
from prfaas_sandbox.kind.layout import Layout
from prfaas_sandbox.processes import Command, run, run_logged
from prfaas_sandbox.progress import OnProgress, ticking
from prfaas_sandbox.tools import COREDNS, KIND, NODE, PROMETHEUS, ensure_modules, module_folder, pinned_version

BUILD_TIMEOUT_SECONDS = 1800.0
PULL_TIMEOUT_SECONDS = 900.0
NEEDED_BYTES = 8 * 2**30
KEPT_IMAGES = 3
"""Of each kind. A set of images takes 2.3 GB, and each change of the sources makes another one."""
WORK_PREFIX = "kind-build-"
STEP_MARK = "== "
ROOT_TOOLS = ("debootstrap", "tar", "apt-get")
# The newest of kind 0.33's images whose kubelet still starts under cgroup v1; a tag alone may be another release's.
PUBLISHED_NODE = "kindest/node:v1.34.11@sha256:44e222ee2132dab25ff87301682f89eb82c7880ea3a1bf543bfe9708fd08d67d"
PRODUCT_SUITE = "trixie"
NODE_SOURCES = (
    "kind/node-image.sh", "kind/debian.sh", "kind/cni.tmpl", "kind/go.mod", "kind/go.sum", "node", "coredns",
)  # fmt: skip
BASE_SOURCES = ("kind/base-image.sh", "kind/debian.sh", "kind/base.Dockerfile")
PRODUCT_SOURCES = (
    "Dockerfile", "pyproject.toml", "requirements.lock.txt", "requirements-uv.lock.txt", "requirements-build.lock.txt",
    "README.md", "LICENSE", "core", "operator", "gateway", "scheduler", "transfer", "worker", "connectors",
)  # fmt: skip
REPOSITORIES = ("prfaas/kind-node", "prfaas/kind-base", "prfaas/kind-prometheus", "prfaas/kind-vllm")
TARGETS = ("operator", "gateway", "worker", "vllm-connector")


@dataclass(frozen=True)
class ImageBuilder:
    """Builds images and reports progress."""

    layout: Layout
    report: OnProgress

    async def pulls(self, reference: str) -> bool:
        """Return whether Docker has an image or can pull it from its registry."""
        async with ticking(self.report, lambda: f"{reference} (pulling)"):
            try:
                await docker("pull", reference, timeout_seconds=PULL_TIMEOUT_SECONDS)
            except PeerError:
                return False
        return True

    async def check_space(self) -> None:
        """Raise ConfigError if Docker's disk has too little room for a build."""
        free = await free_bytes()
        if free is not None and free < NEEDED_BYTES:
            raise ConfigError(
                f"Docker's disk has {free / 2**30:.1f} GiB free, and the images need about {NEEDED_BYTES / 2**30:.0f}: "
                "make room (`docker system df` shows what holds it, `make kind-down PURGE=1` removes ours)"
            )

    async def script(self, name: str, reference: str, environment: Mapping[str, str] | None = None) -> None:
        """Build an image by a script of tools/kind, from Debian packages."""
        if os.geteuid() != 0 or missing_programs(ROOT_TOOLS):
            needs = ", ".join(missing_programs(ROOT_TOOLS)) or "root"
            raise ConfigError(
                "no image can be pulled here, so they are built from Debian packages, and that needs "
                f"{needs}: {INSTALL_ADVICE}"
            )
        async with self._folder() as work:
            command = Command(
                [self.layout.tools / "kind" / name, work, reference],
                shown=f"building {reference}",
                environment=environment or {},
                timeout_seconds=BUILD_TIMEOUT_SECONDS,
            )
            await self.run(command, reference)

    async def run(self, command: Command, reference: str) -> None:
        """Run the build command of an image; its output goes to a log of the image's name."""
        step = ""

        def read(line: str) -> None:
            nonlocal step
            if line.startswith(STEP_MARK):
                step = f", {line.removeprefix(STEP_MARK)}"

        await self.check_space()
        log = self.layout.logs / f"{reference.replace('/', '-').replace(':', '-')}.log"
        async with ticking(self.report, lambda: reference + step):
            await run_logged(command, log, read)

    @asynccontextmanager
    async def _folder(self) -> AsyncIterator[Path]:
        """Yield an empty folder on the cache's disk, and remove it afterwards."""
        cache_folder().mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=WORK_PREFIX, dir=cache_folder()))
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def clear_work() -> None:
    """Remove the folders of killed builds."""
    for folder in cache_folder().glob(f"{WORK_PREFIX}*"):
        shutil.rmtree(folder, ignore_errors=True)


def missing_programs(names: Sequence[str]) -> list[str]:
    """Return those programs that PATH lacks."""
    return [name for name in names if shutil.which(name) is None]


def digest(root: Path, parts: Iterable[str], *more: str) -> str:
    """Return a short hash of files and folders below `root`, names and contents, and of further words."""
    total = hashlib.sha256("\0".join(more).encode())
    for part in parts:
        path = root / part
        files = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
        for file in files:
            if "__pycache__" not in file.parts:
                content = file.read_bytes()
                total.update(f"{file.relative_to(root)}\0{len(content)}\0".encode() + content)
    return total.hexdigest()[:12]


@dataclass(frozen=True)
class NodeImage:
    """The image of kind's nodes. A `published` one is kind's own and brings a pod network; ours has it built in."""

    reference: str
    published: bool


async def node_image(builder: ImageBuilder) -> NodeImage:
    """Return the node image: ours if Docker has it, else the published one, else ours after a build."""
    tools = builder.layout.tools
    version = f"v{pinned_version((tools / NODE.name / 'go.mod').read_text(), NODE.pin)}"
    own = f"prfaas/kind-node:{version}-{digest(tools, NODE_SOURCES)}"
    if await has_image(own):
        return NodeImage(own, published=False)
    if await has_image(PUBLISHED_NODE) or await builder.pulls(PUBLISHED_NODE):
        return NodeImage(PUBLISHED_NODE, published=True)
    builder.report("no image can be pulled here: the node image is built, about 10 minutes the first time")
    programs = await asyncio.to_thread(ensure_modules, (NODE, COREDNS), builder.report)
    files = await asyncio.to_thread(module_folder, KIND, KIND.pin, builder.report)
    environment = {
        **{name.upper(): str(programs[name]) for name in ("kube", "coredns", "pause")},
        "KIND_FILES": str(files / "images" / "base" / "files"),
        "VERSION": version,
        "OWNER": builder.layout.label,
    }
    await builder.script("node-image.sh", own, environment)
    return NodeImage(own, published=False)


async def base_image(builder: ImageBuilder, suite: str = PRODUCT_SUITE) -> str:
    """Return an image with a release of Debian and its Python; prfaas's own images are made on one."""
    tools = builder.layout.tools
    base = f"prfaas/kind-base:{suite}-{digest(tools, BASE_SOURCES)}"
    if await has_image(base):
        return base
    if await builder.pulls(f"debian:{suite}-slim"):
        source = tools / "kind"
        words = ["build", "-q", "-t", base, "--build-arg", f"SUITE={suite}", "-f", source / "base.Dockerfile", source]
        await builder.run(build_command([await docker_client(), *words]), base)
    else:
        await builder.script("base-image.sh", base, {"SUITE": suite})
    return base


async def product_images(builder: ImageBuilder) -> Images:
    root = builder.layout.repository
    base = await base_image(builder)
    tag = digest(root, PRODUCT_SOURCES, base)
    references = {target: f"prfaas/{target}:kind-{tag}" for target in TARGETS}
    for target, reference in references.items():
        if not await has_image(reference):
            words = [await docker_client(), "build", "--target", target, "-t", reference]
            words += ["--build-arg", f"BASE={base}", "--build-arg", "TORCH=debian", root]
            await builder.run(build_command(words), reference)
    sizes = await inspect("{{.Size}}", *references.values())
    lines = (f"{target} {int(size) / 1e6:.0f} MB" for target, size in zip(references, sizes, strict=True))
    builder.report(f"images, unpacked: {', '.join(lines)}")
    return Images(
        operator=references["operator"],
        gateway=references["gateway"],
        worker=references["worker"],
        connector=references["vllm-connector"],
    )


async def prometheus_image(builder: ImageBuilder) -> str:
    """Return an image with only our Prometheus in it."""
    program = (await asyncio.to_thread(ensure_modules, (PROMETHEUS,), builder.report))["prometheus"]
    reference = f"prfaas/kind-prometheus:{program.parent.name.rpartition('-')[2]}"
    if not await has_image(reference):
        recipe = builder.layout.tools / "kind" / "prometheus.Dockerfile"
        words = [await docker_client(), "build", "-q", "-t", reference, "-f", recipe, program.parent]
        await builder.run(build_command(words), reference)
    return reference


def build_command(words: Sequence[str | Path]) -> Command:
    environment = {"DOCKER_BUILDKIT": "1", "BUILDKIT_PROGRESS": "plain"}
    return Command(words, f"docker build of {words[-1]}", environment, timeout_seconds=BUILD_TIMEOUT_SECONDS)


async def docker_client() -> str:
    """Return a docker client on PATH that can build with BuildKit; newer ones need their plugin buildx for that.

    Raises ConfigError if there is none.
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


async def remove_images(kept: int = 0, used: Collection[str] = ()) -> None:
    """Remove the images that this package has built, but those in use and the newest `kept` of each kind."""
    for repository in (*REPOSITORIES, *(f"prfaas/{target}" for target in TARGETS)):
        listed = await docker("images", "--format", "{{.Repository}}:{{.Tag}}", repository)
        for reference in built_before(listed.splitlines(), kept, used):
            if kept:
                await succeeds("rmi", reference)
            else:
                await docker("rmi", "-f", reference)


def built_before(listed: Sequence[str], kept: int, used: Collection[str] = ()) -> list[str]:
    """Return those of a repository's images, newest first, that we built before the newest `kept`, but none of `used`.

    One that was made again of cached layers keeps its old date.
    """
    own = [line for line in listed if line.partition(":")[0] in REPOSITORIES or ":kind-" in line]
    return [line for line in own[kept:] if line not in used]
