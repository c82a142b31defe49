"""Proves that the committed CRDs say what the models say, and that `prfaas crds` sees and repairs a difference."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from prfaas.api import crd
from prfaas.cli import crds
from prfaas.errors import ConfigError

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("directory", crds.DIRECTORIES, ids=str)
def test_committed_files_are_up_to_date(directory):
    assert crds.stale(ROOT / directory) == {}


def test_write_makes_the_files_and_removes_stale_ones(tmp_path):
    stale = tmp_path / "prfaas.io_stale.yaml"
    stale.write_text("kind: Stale\n")
    result = CliRunner().invoke(crds.app, ["write", str(tmp_path)])
    assert result.exit_code == 0
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == crd.files()
    assert f"removed {stale}" in result.output


def test_write_touches_nothing_that_is_up_to_date(tmp_path):
    CliRunner().invoke(crds.app, ["write", str(tmp_path)])
    assert CliRunner().invoke(crds.app, ["write", str(tmp_path)]).output == ""


def test_diff_is_silent_when_up_to_date(tmp_path):
    CliRunner().invoke(crds.app, ["write", str(tmp_path)])
    result = CliRunner().invoke(crds.app, ["diff", str(tmp_path)])
    assert (result.exit_code, result.output) == (0, "")


def test_diff_shows_an_edited_file_and_says_what_to_do(tmp_path):
    CliRunner().invoke(crds.app, ["write", str(tmp_path)])
    edited = tmp_path / "prfaas.io_decodepools.yaml"
    edited.write_text(edited.read_text().replace("maximum: 10000", "maximum: 7"))
    result = CliRunner().invoke(crds.app, ["diff", str(tmp_path)])
    assert result.exit_code == 1
    assert "-                  maximum: 7\n" in result.output
    assert "+                  maximum: 10000\n" in result.output
    assert "run `prfaas crds write`" in result.output


def test_missing_directory_is_named(tmp_path):
    result = CliRunner().invoke(crds.app, ["write", str(tmp_path / "nowhere")])
    assert isinstance(result.exception, ConfigError)
    assert "nowhere is not a directory: run this in the repository root" in str(result.exception)
