"""The sweep removes what no run completed or uses, and nothing else."""

import base64
import fcntl
import hashlib
import os
from pathlib import Path

import pytest
from tools.ci import sweep


def installed(folder: Path, *, complete: bool = True) -> Path:
    """Make an environment of one package, with a source and a library."""
    packages = folder / "lib" / "python3.11" / "site-packages"
    (packages / "thing").mkdir(parents=True)
    source, library = packages / "thing" / "a.py", packages / "thing" / "b.so"
    source.write_text("x = 1\n")
    library.write_bytes(b"\0" * 10)
    digest = base64.urlsafe_b64encode(hashlib.sha256(source.read_bytes()).digest()).rstrip(b"=").decode()
    info = packages / "a_thing-1.0.dist-info"
    info.mkdir()
    lines = [f"thing/a.py,sha256={digest},6", "thing/b.so,sha256=AAAA,10", "a_thing-1.0.dist-info/RECORD,,"]
    (info / "RECORD").write_text("\n".join(lines) + "\n")
    if complete:
        (folder / sweep.COMPLETE).touch()
    return packages / "thing"


def swept(cache: Path) -> set[str]:
    list(sweep.sweep_cache(cache))
    return {found.name for found in cache.iterdir() if found.is_dir()}


@pytest.fixture(autouse=True)
def _no_uv(monkeypatch):
    monkeypatch.setattr(sweep, "find_uv", lambda: None)


def test_whole_environments_stay_and_unfinished_ones_go(tmp_path):
    installed(tmp_path / "vllm-1")
    installed(tmp_path / "vllm-2", complete=False)
    (tmp_path / "bin-kubernetes-3").mkdir()
    (tmp_path / "dynamo-4.new").mkdir()
    (tmp_path / "others").mkdir()
    assert swept(tmp_path) == {"vllm-1", "others"}


@pytest.mark.parametrize("damage", ["changed", "source is missing", "library is missing"])
def test_an_environment_whose_files_were_changed_goes(tmp_path, damage):
    thing = installed(tmp_path / "vllm-1")
    if damage == "changed":
        (thing / "a.py").write_text("x = 2\n")
    else:
        (thing / ("a.py" if "source" in damage else "b.so")).unlink()
    assert sweep.changed_packages(tmp_path / "vllm-1") == ["a-thing"]
    assert swept(tmp_path) == set()


def test_nothing_is_removed_while_a_build_holds_the_cache(tmp_path, capsys):
    installed(tmp_path / "vllm-2", complete=False)
    with (tmp_path / "build.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert swept(tmp_path) == {"vllm-2"}
    assert "Another build" in capsys.readouterr().out


def test_folders_of_a_pytest_that_runs_stay(tmp_path, monkeypatch):
    base = tmp_path / "pytest-of-me"
    for name, owner in (("pytest-1", "4194303"), ("pytest-2", str(os.getpid())), ("pytest-3", "")):
        (base / name).mkdir(parents=True)
        if owner:
            (base / name / ".lock").write_text(owner)
    list(sweep.sweep_pytest_folders(tmp_path))
    assert [found.name for found in base.iterdir()] == ["pytest-2"]


def test_segments_that_a_process_maps_stay(tmp_path, monkeypatch):
    (tmp_path / "psm_dead").touch()
    (tmp_path / "vllm_dist_live").touch()
    (tmp_path / "other").touch()
    monkeypatch.setattr(sweep, "read", lambda _: f"7f00-7f01 rw-s 0 0:1 1 {tmp_path}/vllm_dist_live")
    list(sweep.sweep_shared_memory(tmp_path))
    assert {found.name for found in tmp_path.iterdir()} == {"vllm_dist_live", "other"}
