"""The Go programs that the sandbox runs, and where they come from.

`tools/<module>/go.mod` pins each of them; the version is read from there and written nowhere else. A module is built as
a whole, because its programs share almost all packages.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from prfaas.errors import ConfigError


@dataclass(frozen=True)
class Program:
    """One program of a Go module.

    Args:
        name: what we, and PATH, call it.
        binary: what `go install` calls it.
        version_command: arguments that print the version; none if the program is always built, never taken from PATH.
        version_pattern: regular expression that the output must match; `{version}` stands for the pin without its `v`.
        pin: the Go module that the program's version comes from, when it is not its GoModule's.

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
        pin: the Go module whose version counts as the version of the whole.
        programs: what it installs.
        ldflags: flags of the linker; `{version}` stands for the pin without its `v`.
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
    "node",
    "k8s.io/kubernetes",
    (Program("kube", "kube"), Program("pause", "pause")),
    ldflags=_KUBERNETES_LDFLAGS,
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
    """Absolute paths of the programs, by the name that `Program.name` gives them."""

    paths: dict[str, Path]

    def __getitem__(self, name: str) -> Path:
        return self.paths[name]


def source_folder() -> Path:
    """Return the checkout's `tools/`; raise ConfigError when prfaas is installed without one."""
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
    """Return the (major, minor) version of Go that the text of a go.mod asks for."""
    match = re.search(r"^go (\d+)\.(\d+)", go_mod, re.MULTILINE)
    if match is None:
        raise ConfigError("go.mod names no Go version")
    return int(match[1]), int(match[2])
