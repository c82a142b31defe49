"""The document of an evaluation, docs/understand/evaluation.md: the page's sections as Markdown, without its charts."""

from prfaas.cli.evaluation.content import Evaluation, TextTable
from prfaas.cli.evaluation.sections import sections_of


def evaluation_markdown(evaluation: Evaluation) -> str:
    """Return the document."""
    parts = [f"# Evaluation of {_cell(evaluation.case.name)}", f"    {evaluation.command}"]
    for title, items in sections_of(evaluation):
        parts += [f"## {title}"] if title else []
        for item in items:
            if isinstance(item, TextTable):
                parts += _table(item)
            elif isinstance(item, str):
                parts.append(_text(item))
    return "\n\n".join(parts) + "\n"


def _table(table: TextTable) -> list[str]:
    lines = [table.head, ["---"] * len(table.head), *table.rows]
    title = [f"**{_cell(table.title)}**"] if table.title else []
    return [*title, "\n".join(f"| {' | '.join(map(_cell, line))} |" for line in lines)]


def _text(words: str) -> str:
    """Return what Markdown shows as it stands, whoever wrote it."""
    return words.replace("<", "&lt;")


def _cell(words: str) -> str:
    return " ".join(_text(words).replace("|", "\\|").split())
