"""The sections of an evaluation, which the page and the document have in the same order, and with the same words.

They open with the answer. How it was done and what failed stand before all figures, and what repeats it at the end.
"""

from enum import Enum, auto
from typing import NamedTuple

from prfaas.cli.evaluation.content import (
    Evaluation,
    TextTable,
    against_expected,
    answer,
    broken_table,
    certainty,
    failed_table,
    figure_tables,
    headline_table,
    limit_table,
    load_sentence,
    made_table,
    question,
    run_table,
    saturated_table,
    system_table,
)
from prfaas.cli.evaluation.paragraphs import (
    COUNTED,
    EMULATED,
    EXPECTED,
    LINK_USE,
    NO_FIRST_TOKENS,
    NO_GPU,
    PLACES,
    RUNS,
    SATURATED,
    WITHIN,
)


class Chart(Enum):
    """A drawing, or several."""

    MOST = auto()
    FIRST_TOKENS = auto()
    OVER_TIME = auto()
    PARTS = auto()


class ReportSection(NamedTuple):
    """Paragraphs, tables and charts under a title; the first section has none."""

    title: str
    items: tuple[str | TextTable | Chart, ...]


def sections_of(evaluation: Evaluation) -> list[ReportSection]:
    """Return all that an evaluation has to say. Empty paragraphs and tables without rows are left out."""
    summary, case = evaluation.summary, evaluation.case
    failed = failed_table(evaluation)
    total = len(evaluation.runs) + len(evaluation.unread) + len(summary.missing)
    scale = (
        f"Times are {case.stretch:g} times as long as said here, and caches and the link {case.cache_scale:,} times as "
        "small: a machine without a GPU holds the whole system."
    )
    figures = figure_tables(summary)
    no_first_tokens = "" if any(row.measured for row in summary.rows) else NO_FIRST_TOKENS
    sections = [
        ReportSection(
            "",
            (
                answer(summary),
                NO_GPU if evaluation.runs else "",
                *(certainty(summary), against_expected(summary), headline_table(summary)),
            ),
        ),
        ReportSection(
            "What was asked",
            (question(evaluation), load_sentence(case.file, case.requests), system_table(evaluation), PLACES),
        ),
        ReportSection("How it was done", (EMULATED, scale, COUNTED, SATURATED, WITHIN, EXPECTED)),
        ReportSection(
            "What came out",
            (
                *(Chart.MOST, saturated_table(summary)),
                *(Chart.FIRST_TOKENS, no_first_tokens, limit_table(summary), broken_table(summary)),
                *(Chart.OVER_TIME, Chart.PARTS),
            ),
        ),
        ReportSection("What failed", (f"{total - len(failed.rows)} of {total} runs count.", failed, *evaluation.notes)),
        ReportSection(
            "All figures",
            (
                *((f"Off is by how much measured is more. {LINK_USE}", *figures) if figures else ()),
                *(run_table(summary), RUNS if summary.rows else ""),
            ),
        ),
        ReportSection("How it was made", (made_table(case, evaluation.runs, evaluation.command),)),
    ]
    return [ReportSection(one.title, tuple(item for item in one.items if _is_there(item))) for one in sections]


def _is_there(item: str | TextTable | Chart) -> bool:
    return bool(item.rows) if isinstance(item, TextTable) else bool(item)
