"""A state folder belongs to one process at a time, is emptied only when it was one, and names its owner."""

import os

import pytest

from prfaas.errors import ConfigError
from prfaas_sandbox.state import StateFolder


def test_holding_empties_and_names_the_owner(tmp_path):
    state = StateFolder(tmp_path / "state")
    assert state.owner() is None
    with state.hold():
        assert state.owner() == os.getpid()
        (state.root / "hub" / "left").write_text("over")
        with pytest.raises(ConfigError, match=f"process {os.getpid()}"), state.hold():
            pass
    assert state.owner() is None
    with state.hold():
        assert not (state.root / "hub" / "left").exists()
    assert state.root.stat().st_mode & 0o777 == 0o700


def test_keeps_a_folder_with_other_things(tmp_path):
    (tmp_path / "thesis.txt").write_text("years")
    with pytest.raises(ConfigError, match="not a state folder of a sandbox"), StateFolder(tmp_path).hold():
        pass
    assert (tmp_path / "thesis.txt").read_text() == "years"


def test_a_path_too_long_for_sockets_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="too long"), StateFolder(tmp_path / ("x" * 100)).hold():
        pass
