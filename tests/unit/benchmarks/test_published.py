"""Proves that docs/understand/evaluation.md is made from all records that are kept, and that a part of them is none."""

import lzma
import re
import shutil
from pathlib import Path

import msgspec
import pytest
from benchmarks.evaluation.__main__ import part_of
from benchmarks.evaluation.part import simulator_of
from benchmarks.evaluation.published import COMMAND, NOTES, RECORDS, chapters, published
from tests.unit.evaluate.cases import invalid
from typer.testing import CliRunner

from prfaas.cli.evaluation.content import TITLES, Evaluation, saturated_table
from prfaas.cli.evaluation.document import document_files
from prfaas.errors import ConfigError
from prfaas.evaluate.record import Run
from prfaas_sandbox.evaluate import command

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs/understand/evaluation.md"
REMADE = "call python -m benchmarks.evaluation.published"


@pytest.fixture(scope="module")
def made() -> Evaluation:
    return published()


def without_figures(text: str) -> list[str]:
    return [re.sub(r"\d[\d.,]*", "#", line) for line in text.splitlines()]


def test_the_page_is_what_is_made_of_the_records():
    """Figures of plan and simulator may move with these. All else may not."""
    files = document_files(chapters())

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


def test_the_first_page_of_the_project_says_the_gain_that_the_page_says(made):
    found = made.summary.ratios["homogeneous"].saturated
    words = " ".join((ROOT / "README.md").read_text().split())
    cells = PAGE.read_text().replace("\N{NO-BREAK SPACE}", " ")

    assert f"which serve {found.value:.2f} times as much ({found.low:.2f} to {found.high:.2f})" in words
    assert f"most requests/s | {found.value:.2f} | {found.low:.2f} to {found.high:.2f} |" in cells, REMADE


def test_a_page_of_some_of_the_runs_is_refused(tmp_path: Path):
    for path in [*RECORDS.glob("*.xz")][1:]:
        shutil.copy(path, tmp_path)

    with pytest.raises(ConfigError, match="130-1: it is missing"):
        published(tmp_path)


def keep(folder: Path, run: Run) -> None:
    folder.mkdir(exist_ok=True)
    (folder / f"{run.key.name}.json.xz").write_bytes(lzma.compress(msgspec.json.encode(run), preset=0))


def test_a_part_has_a_chapter_where_it_has_records_and_only_there(tmp_path: Path):
    part = part_of("longloop")
    (key,) = part.runs
    run = simulator_of(part.case)(key)
    assert chapters(tmp_path) == []

    keep(tmp_path / "longloop", run)
    (chapter,) = chapters(tmp_path)
    assert (chapter.case.name, chapter.command) == ("longloop", part.command)
    assert "evaluation/instances.svg" in document_files([chapter])

    keep(tmp_path / "longloop", invalid(run))
    with pytest.raises(ConfigError, match="the machine was too slow"):
        chapters(tmp_path)


def test_a_part_of_which_some_runs_are_there_is_refused_and_one_without_any_is_not_asked_for(tmp_path: Path):
    saturated, beside, steady = (part_of(name) for name in ("saturated", "beside", "steady"))
    simulated = simulator_of(saturated.case)
    for key in (saturated.runs[0], *({*beside.runs} & {*steady.runs})):
        keep(tmp_path / "paper", simulated(key))

    with pytest.raises(ConfigError, match=f"{saturated.runs[1].name}: it is missing") as refused:
        chapters(tmp_path)
    assert not re.search("-(50|70|90)-", str(refused.value))


def test_the_command_makes_the_runs_that_are_kept(made, tmp_path: Path, monkeypatch):
    asked: list[object] = []
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(command, "_run", lambda campaign, _: asked.append(campaign) or {})
    words = COMMAND.removeprefix("prfaas evaluate ").split()
    CliRunner().invoke(command.app, [*words, "--runs", str(tmp_path)])
    (campaign,) = asked

    assert campaign.case.digest == made.case.digest
    assert {*campaign.wanted.asked} == {run.key for run in made.runs}
