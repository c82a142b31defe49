"""The document of an evaluation, docs/understand/evaluation.md: the page's sentences and tables as Markdown."""

from prfaas.cli.evaluation.content import (
    COUNTED,
    EMULATED,
    LINK_USE,
    MOST,
    Evaluation,
    TextTable,
    against_expected,
    answer,
    broken_table,
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


def evaluation_markdown(evaluation: Evaluation) -> str:
    """Return the document."""
    summary, case = evaluation.summary, evaluation.case
    failed = failed_table(evaluation)
    parts = [
        f"# Evaluation of {_text(case.name)}",
        f"    {evaluation.command}",
        answer(summary),
        against_expected(summary),
        *_table(headline_table(summary)),
        *_table(saturated_table(summary)),
        *_table(limit_table(summary)),
        *(_table(broken) if (broken := broken_table(summary)).rows else []),
        "## What was asked",
        question(evaluation),
        load_sentence(case.file, case.requests),
        *_table(system_table(evaluation)),
        "## How it was done",
        EMULATED,
        f"Times are {case.stretch:g} times as long as said here, and caches and the link {case.cache_scale:,} times as "
        "small: a machine without a GPU holds the whole system.",
        COUNTED,
        MOST,
        *_table(made_table(evaluation)._replace(title="")),
        "## What failed",
        *(_table(failed) if failed.rows else ["Every run says something."]),
        "## All figures",
        f"*Off* is by how much measured is more than what stands before it. {LINK_USE}",
        *(line for one in (*figure_tables(summary), run_table(summary)) for line in _table(one)),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _table(table: TextTable) -> list[str]:
    lines = [table.head, ["---"] * len(table.head), *table.rows]
    title = [f"**{_text(table.title)}**"] if table.title else []
    return [*title, "\n".join(f"| {' | '.join(map(_text, line))} |" for line in lines)]


def _text(cell: str) -> str:
    """Return what Markdown shows as it stands, whoever wrote it."""
    return " ".join(cell.replace("|", "\\|").replace("<", "&lt;").split())
