"""The chapter of an evaluation, which the page and the document have in the same order, and with the same words.

They open with the answer. How it was done and what failed stand before all figures, and what repeats it at the end.
"""

from typing import Final

from prfaas.cli.evaluation.charts import first_token_chart, most_chart, over_time, part_charts
from prfaas.cli.evaluation.content import (
    Chapter,
    Evaluation,
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
    section,
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

FAILED: Final = "What failed"
"""The title of the section for it."""


def chapter_of(evaluation: Evaluation) -> Chapter:
    """Return all that an evaluation has to say."""
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
        section(
            "",
            *(answer(summary), NO_GPU if evaluation.runs else ""),
            *(certainty(summary), against_expected(summary), headline_table(summary)),
        ),
        section(
            "What was asked",
            *(question(evaluation), load_sentence(case.file, case.requests), system_table(evaluation), PLACES),
        ),
        section("How it was done", EMULATED, scale, COUNTED, SATURATED, WITHIN, EXPECTED),
        section(
            "What came out",
            *(most_chart(summary), saturated_table(summary)),
            *(first_token_chart(summary), no_first_tokens, limit_table(summary), broken_table(summary)),
            *(over_time(summary.shown, {}) if summary.shown else None, part_charts(summary)),
        ),
        section(FAILED, f"{total - len(failed.rows)} of {total} runs count.", failed),
        section(
            "All figures",
            *((f"Off is by how much measured is more. {LINK_USE}", *figures) if figures else ()),
            *(run_table(summary), RUNS if summary.rows else ""),
        ),
        section("How it was made", made_table(case, evaluation.runs, evaluation.command)),
    ]
    return Chapter(case, evaluation.command, sections)
