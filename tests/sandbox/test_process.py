"""A volume that would hide the programs of the sandbox has them bound into it; nothing else is bound."""

import sys
from pathlib import Path

import pytest

from prfaas_sandbox.node.process import Mount, program_folders, with_programs

FOLDERS = {"/tmp/clone/.venv", "/tmp/clone/core", "/tmp/clone/.venv/lib/site-packages", "/usr"}


@pytest.mark.parametrize(
    ("path", "bound"),
    [
        ("/tmp", ["/tmp/clone/.venv", "/tmp/clone/core"]),
        ("/tmp/clone", ["/tmp/clone/.venv", "/tmp/clone/core"]),
        ("/tmp/cl", []),
        ("/tmp/clone/core/prfaas", []),
        ("/tmp/clone/core", []),
        ("/usr/share/x", []),
    ],
)
def test_what_a_volume_hides_is_bound_again_read_only_and_once(path, bound):
    mounts = [Mount(path, "/volume", read_only=False)]
    assert with_programs(mounts, FOLDERS) == (*mounts, *(Mount(each, each, read_only=True) for each in bound))


def test_a_volume_at_such_a_folder_itself_stays():
    mounts = [Mount("/tmp", "/a", read_only=False), Mount("/tmp/clone/core", "/b", read_only=False)]
    assert with_programs(mounts, FOLDERS)[2:] == (Mount("/tmp/clone/.venv", "/tmp/clone/.venv", read_only=True),)


def test_the_programs_are_this_interpreters_and_its_packages():
    folders = program_folders()
    assert str(Path(sys.prefix).resolve()) in folders
    assert str(Path(__file__).resolve().parents[2] / "core") in folders
