"""Proves that docs/understand/evaluation.md is made from all records that are kept, and that a part of them is none."""

import lzma
import re
from pathlib import Path

import msgspec
import pytest
from benchmarks.evaluation.__main__ import part_of
from benchmarks.evaluation.part import simulator_of
from benchmarks.evaluation.published import NOTES, chapters
from tests.unit.evaluate.cases import invalid

from prfaas.cli.evaluation.content import TITLES
from prfaas.cli.evaluation.document import document_files
from prfaas.errors import ConfigError
from prfaas.evaluate.record import Run

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs/understand/evaluation.md"
REMADE = "call python -m benchmarks.evaluation.published"


@pytest.fixture(scope="module")
def files() -> dict[str, str]:
    return document_files(chapters())


def without_figures(text: str) -> list[str]:
    return [re.sub(r"\d[\d.,]*", "#", line) for line in text.splitlines()]


def test_the_page_is_what_is_made_of_the_records(files):
    """Figures of plan and simulator may move with these. All else may not."""
    assert without_figures(PAGE.read_text()) == without_figures(files["evaluation.md"]), REMADE
    pictures = {path.relative_to(PAGE.parent).as_posix() for path in (PAGE.parent / "evaluation").iterdir()}
    assert pictures == {*files} - {"evaluation.md"}, REMADE


def measured_cells(page: str) -> list[list[str]]:
    """Return what was measured of each saturated system: its title, load, most requests/s and their interval."""
    return [row.split(" | ")[:5] for row in re.findall(r"^\| (.* \| 130% \| \d\.\d+ \| .*) \|$", page, re.MULTILINE)]


def test_what_was_measured_stands_on_the_page(files):
    page = PAGE.read_text()
    rows = measured_cells(page)

    assert rows == measured_cells(files["evaluation.md"])
    assert {TITLES[one] for one in ("threshold", "naive", "homogeneous")} <= {row[0] for row in rows}
    assert all(note in page.replace("\N{NO-BREAK SPACE}", " ") for notes in NOTES.values() for note in notes)


def test_the_first_page_of_the_project_says_the_gain_that_the_page_says():
    words = " ".join((ROOT / "README.md").read_text().split())
    row = r"^\| PrfaaS-PD over homogeneous: most requests/s \| (\S+) \| (\S+) to (\S+) \|"
    found = re.search(row, PAGE.read_text().replace("\N{NO-BREAK SPACE}", " "), re.MULTILINE)

    assert found
    value, low, high = found.groups()
    assert f"which serve {value} times as much ({low} to {high})" in words


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
    saturated = part_of("saturated")
    keep(tmp_path / "paper", simulator_of(saturated.case)(saturated.runs[0]))

    with pytest.raises(ConfigError, match=f"{saturated.runs[1].name}: it is missing") as refused:
        chapters(tmp_path)
    assert "-90-" not in str(refused.value), "a run of another part"
    assert f"call {saturated.command}," in str(refused.value)
