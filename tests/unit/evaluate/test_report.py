"""Proves that the page and the document of an evaluation say its figures, its failures and what repeats it."""

import re
from xml.etree import ElementTree as ET

import msgspec
import pytest

from prfaas.cli.evaluation.content import (
    Evaluation,
    answer,
    broken_table,
    certainty,
    headline_table,
    limit_table,
    made_table,
    off_by,
    run_table,
)
from prfaas.cli.evaluation.document import document_files
from prfaas.cli.evaluation.report import page_of
from prfaas.cli.evaluation.sections import chapter_of
from prfaas.evaluate.record import ExcludedRun, MachineTiming, Run, RunKey
from prfaas.evaluate.summary import summarise

from .cases import CASE, LIMIT_SECONDS, invalid, keys, live, simulated

COMMAND = "prfaas evaluate -f examples/paper.yaml"


def evaluation(*runs: Run, unread=(), asked=()) -> Evaluation:
    made = summarise(CASE.file, runs, simulated, LIMIT_SECONDS, asked)
    return Evaluation(case=CASE, runs=runs, summary=made, unread=unread, command=COMMAND)


def evaluation_page(made: Evaluation) -> str:
    return page_of(chapter_of(made))


def evaluation_markdown(made: Evaluation) -> str:
    return document_files([chapter_of(made)])["evaluation.md"]


@pytest.fixture(scope="module")
def saturated() -> Evaluation:
    """What more arrives than is served, and nothing else."""
    return evaluation(*(live(RunKey(policy, 1.3, 1)) for policy in ("threshold", "naive", "homogeneous")))


@pytest.fixture(scope="module")
def whole() -> Evaluation:
    runs = [live(key, 0.2) for policy in ("threshold", "naive", "homogeneous") for key in keys(policy, 0.5, 0.7, 0.9)]
    runs += [live(RunKey(policy, 1.5, 1)) for policy in ("threshold", "naive", "homogeneous")]
    bad = invalid(live(RunKey("static", 0.7, 1)))
    torn = ExcludedRun("torn.json", "it is no whole <record>")
    return evaluation(*runs, bad, unread=(torn,), asked=keys("naive", 1.2))


def test_the_page_opens_with_the_answer_and_ends_with_the_command(whole):
    page = evaluation_page(whole)

    assert page.index(answer(whole.summary)) < page.index("What was asked")
    assert page.rindex(COMMAND) > page.index("How it was made")


def test_the_page_is_whole_and_loads_nothing(whole):
    page = evaluation_page(whole)

    for chart in re.findall(r"<svg.*?</svg>", page, re.DOTALL):
        ET.fromstring(chart)
    assert not re.search(r"<script|<link|src=|https?://", page)
    assert "nan" not in page


def test_every_line_of_the_chart_has_its_intervals_plan_and_simulator(whole):
    _, chart, *_ = re.findall(r"<svg.*?</svg>", evaluation_page(whole), re.DOTALL)

    assert chart.count("<polyline") == 5, "four systems, of which one has no figure, and the limit"
    assert chart.count("<circle") == 10, "the plan says something of each load"
    assert len(re.findall(r'<path class="sign s\d" d="M[\d. ]+V', chart)) == sum(
        row.measured is not None for row in whole.summary.rows
    )


def test_what_failed_is_listed_and_escaped(whole):
    page = evaluation_page(whole)

    for name in ("static-70-1", "torn.json", "naive-120-1"):
        assert name in page
    assert "&lt;record&gt;" in page
    assert "static-70-1" in evaluation_markdown(whole)
    assert "&lt;record>" in evaluation_markdown(whole)


def test_the_document_says_what_the_page_says(whole):
    document = evaluation_markdown(whole)
    row = next(row for row in whole.summary.rows if row.policy == "threshold")

    assert answer(whole.summary) in document
    assert f"{row.measured.ttft_p90_seconds.value:.2f}" in document
    assert f"{off_by(row, 'ttft_p90_seconds', 'planned'):+.0%}" in document
    assert COMMAND in document


def test_the_document_has_the_titles_and_tables_of_the_page_in_its_order(whole):
    page = re.findall("<h2>(.*)</h2>|(<table)", evaluation_page(whole))
    document = re.findall("^## (.*)|^(\\| ---)", evaluation_markdown(whole), re.MULTILINE)

    assert [title for title, _ in page] == [title for title, _ in document]


@pytest.mark.parametrize("name", ["whole", "saturated"])
def test_the_document_shows_the_charts_of_the_page_as_files_that_stand_alone(name, request):
    made = request.getfixturevalue(name)
    files = document_files([chapter_of(made)])
    document = files.pop("evaluation.md")

    assert re.findall(r"!\[.+\]\((.+)\)", document) == list(files)
    assert len(files) == evaluation_page(made).count("<svg")
    for picture in files.values():
        assert ET.fromstring(picture).tag == "{http://www.w3.org/2000/svg}svg"
        assert "--ink: #1a1f2b" in picture


def test_a_further_chapter_has_a_title_and_charts_of_its_own(saturated):
    first = chapter_of(saturated)
    second = first._replace(case=msgspec.structs.replace(CASE, name="paper-falls"), command="prfaas bench evaluation")
    alone, both = document_files([first]), document_files([first, second])
    document = both["evaluation.md"]

    assert document.startswith(alone["evaluation.md"])
    added = document.removeprefix(alone["evaluation.md"])
    assert re.findall("^#+ .*", added, re.MULTILINE)[:2] == [
        "## Evaluation of the case paper-falls",
        "### What was asked",
    ]
    assert "\n    prfaas bench evaluation\n" in added
    assert re.findall(r"!\[.+\]\((.+)\)", document) == list(both)[1:]
    assert {name for name in both if name not in alone} == {
        name.replace("evaluation/", "evaluation/paper-falls-") for name in alone if name != "evaluation.md"
    }


def test_overload_alone_has_its_charts_and_no_table_without_figures(saturated):
    document = document_files([chapter_of(saturated)])

    assert [*document] == [
        "evaluation.md",
        *(f"evaluation/{name}.svg" for name in ("most", "threshold", "link")),
        *(f"evaluation/parts-{policy}.svg" for policy in ("threshold", "naive", "homogeneous")),
    ]
    assert "130%, overloaded" in document["evaluation/parts-naive.svg"]
    assert "P90, s" not in document["evaluation.md"]
    assert "No load was served that a system carries" in document["evaluation.md"]
    assert not re.search(r"^\|( -? *\|)+$", document["evaluation.md"], re.MULTILINE)


def test_a_limit_above_the_most_is_not_said(saturated):
    assert "times as many as" in answer(saturated.summary)
    assert "it serves less than" not in answer(saturated.summary)


def test_one_run_of_each_load_and_a_gain_that_may_be_chance_are_said(saturated):
    ratio = saturated.summary.ratios["naive"]
    sure = msgspec.structs.replace(ratio, saturated=msgspec.structs.replace(ratio.saturated, low=1.1))
    chance = msgspec.structs.replace(ratio, saturated=msgspec.structs.replace(ratio.saturated, low=0.9))
    for naive, is_said in ((sure, False), (chance, True)):
        summary = msgspec.structs.replace(saturated.summary, ratios={"naive": naive})
        assert ("The interval of the gain over naive holds 1" in certainty(summary)) == is_said
        assert "Each load was served once" in certainty(summary)


def test_seeds_that_repeat_each_load_are_not_called_one_run():
    runs = [live(key) for key in keys("threshold", 0.5, seeds=2)]
    assert not certainty(evaluation(*runs).summary)


def test_systems_that_were_served_by_different_versions_are_marked():
    ours, theirs = (live(RunKey(policy, 0.5, 1)) for policy in ("threshold", "homogeneous"))
    later = msgspec.structs.replace(theirs, software="prfaas 0.1.0, commit 1f2e-dirty")

    assert "of prfaas 0.1.0 and prfaas 0.1.0, commit 1f2e-dirty:" in certainty(evaluation(ours, later).summary)
    assert "The runs are of" not in certainty(evaluation(ours, theirs).summary), "the negative control"


def test_the_tables_of_the_document_have_as_many_cells_as_their_heads(whole):
    for table in re.findall(r"(?:^\|.*\|\n?)+", evaluation_markdown(whole), re.MULTILINE):
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in table.strip().split("\n")}) == 1


def test_the_answer_names_the_ratios_and_how_sure_they_are(whole):
    ratio = whole.summary.ratios["homogeneous"].saturated

    assert f"{ratio.value:.2f} ± " in answer(whole.summary)
    assert "times as many as homogeneous" in answer(whole.summary)


def test_the_first_table_has_the_ratios_beside_plan_and_simulator(whole):
    rows = {title: cells for title, *cells in headline_table(whole.summary).rows}
    ratio = whole.summary.ratios["naive"]

    assert rows["PrfaaS-PD over naive: most requests/s"] == [
        f"{ratio.saturated.value:.2f}",
        f"{ratio.saturated.low:.2f}\N{NO-BREAK SPACE}to\N{NO-BREAK SPACE}{ratio.saturated.high:.2f}",
        f"{ratio.saturated_planned:.2f}",
        f"{ratio.saturated_simulated.value:.2f}",
    ]
    assert rows["Measured P90 of the first token is off by, in the mean of all loads"][-1].endswith("%")


def test_the_limit_names_what_holds_what_breaks_and_what_failed_first(whole):
    (row,) = (row for row in limit_table(whole.summary).rows if row[0] == "homogeneous")
    limit = whole.summary.answers["homogeneous"].limit
    (broken,) = (row for row in broken_table(whole.summary).rows if row[0] == "homogeneous")

    assert row[2] == f"{limit.bounds.high:.2f}"
    assert broken[1:3] == (row[2], limit.why_broken)


def test_what_failed_first_says_for_what_most_time_went():
    run = live(RunKey("homogeneous", 1.5, 1))
    waiting = [
        msgspec.structs.replace(one, parts={"prefill": 2.0, "decode_queue": 7.0, "transfer": 1.0})
        for one in run.answers
    ]
    made = evaluation(msgspec.structs.replace(run, answers=tuple(waiting)))

    assert broken_table(made.summary).rows[0][-1] == "waits to be decoded: 7.0 of 10.0 s"


def test_each_load_has_its_verdict(whole):
    verdicts = [row[-1] for row in run_table(whole.summary).rows]

    assert sum(one.startswith("broken: ") for one in verdicts) >= 3
    assert "open: no run counts" in verdicts


def test_without_our_system_there_is_no_answer():
    assert "no answer" in answer(evaluation(live(RunKey("homogeneous", 0.5, 1))).summary)
    assert "no answer" in answer(evaluation(invalid(live(RunKey("threshold", 0.5, 1)))).summary)


def test_a_limit_that_nothing_keeps_is_said():
    made = summarise(CASE.file, [live(RunKey("threshold", 0.5, 1))], simulated, 0.1)

    assert "it serves less than 1.63 a second" in answer(made)


@pytest.mark.parametrize(("p99", "says"), [(0.1, "at most 10%"), (None, "more than 500%")])
def test_the_page_says_how_late_steps_ended_in_the_worst_run(p99, says):
    timings = [MachineTiming(mean_late=0.01, p99_late=one, busy_share=0.5) for one in (0.05, p99)]
    runs = [msgspec.structs.replace(live(RunKey("threshold", 0.5, 1)), machine=one) for one in timings]
    (late,) = (text for name, text in made_table(CASE, runs, COMMAND).rows if name == "late")

    assert late.startswith(f"steps ended at most 1.0% of their time late in the mean of a run, with a P99 of {says};")


def test_no_runs_are_a_page_too():
    made = evaluation()

    assert "<svg" not in evaluation_page(made)
    assert "0 of 0 runs count" in evaluation_markdown(made)


def test_a_run_without_parts_or_readings_is_drawn():
    run = simulated(RunKey("threshold", 0.5, 1))
    answers = tuple(msgspec.structs.replace(one, parts={}) for one in run.answers)
    run = msgspec.structs.replace(run, answers=answers)

    assert "Where the time to the first token went" not in evaluation_page(evaluation(run))
    assert "nothing to show" in evaluation_page(evaluation(msgspec.structs.replace(run, readings=())))
