"""Proves that docs/understand/evaluation.md is made from the records that are kept, and that a part of them is none."""

import re
import shutil
from pathlib import Path

import pytest
from benchmarks.evaluation.published import COMMAND, NOTES, RECORDS, published
from typer.testing import CliRunner

from prfaas.cli.evaluation.content import TITLES, Evaluation, saturated_table
from prfaas.cli.evaluation.document import document_files
from prfaas.errors import ConfigError
from prfaas_sandbox.evaluate import command

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs/understand/evaluation.md"
REMADE = "call python -m benchmarks.evaluation.published"


@pytest.fixture(scope="module")
def made() -> Evaluation:
    return published()


def without_figures(text: str) -> list[str]:
    return [re.sub(r"\d[\d.,]*", "#", line) for line in text.splitlines()]


def test_the_page_is_what_is_made_of_the_records(made):
    """Figures of plan and simulator may move with these. All else may not."""
    files = document_files(made)

    assert without_figures(PAGE.read_text()) == without_figures(files["evaluation.md"]), REMADE
    pictures = {path.relative_to(PAGE.parent).as_posix() for path in (PAGE.parent / "evaluation").iterdir()}
    assert pictures == {*files} - {"evaluation.md"}, REMADE


def test_what_was_measured_stands_on_the_page(made):
    page = PAGE.read_text().replace("\N{NO-BREAK SPACE}", " ")
    rows = saturated_table(made.summary).rows

    assert {row[0] for row in rows} == {TITLES[one] for one in ("threshold", "naive", "homogeneous")}
    for row in rows:
        assert f"| {' | '.join(row[:5])} |".replace("\N{NO-BREAK SPACE}", " ") in page
    assert all(note in page for note in NOTES)


def test_a_page_of_some_of_the_runs_is_refused(tmp_path: Path):
    for path in [*RECORDS.glob("*.xz")][1:]:
        shutil.copy(path, tmp_path)

    with pytest.raises(ConfigError, match="130-1: it is missing"):
        published(tmp_path)


def test_the_command_makes_the_runs_that_are_kept(made, tmp_path: Path, monkeypatch):
    asked: list[object] = []
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(command, "_run", lambda campaign, _: asked.append(campaign) or {})
    words = COMMAND.removeprefix("prfaas evaluate ").split()
    CliRunner().invoke(command.app, [*words, "--runs", str(tmp_path)])
    (campaign,) = asked

    assert campaign.case.digest == made.case.digest
    assert {*campaign.wanted.asked} == {run.key for run in made.runs}
