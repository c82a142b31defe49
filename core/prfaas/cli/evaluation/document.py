"""The document of an evaluation, such as docs/understand/evaluation.md: the page's sections as Markdown, with its
charts as files beside it."""

from collections.abc import Iterator
from typing import Final

from prfaas.cli.evaluation.charts import draw_chart
from prfaas.cli.evaluation.content import Evaluation, TextTable, title_of
from prfaas.cli.evaluation.sections import Chart, sections_of
from prfaas.cli.page import picture_of

_FOLDER: Final = "evaluation"


def document_files(evaluation: Evaluation) -> dict[str, str]:
    """Return the document and its pictures, each by its path beside the document."""
    pictures = {
        _path(one.name): picture_of(one.drawing)
        for chart in Chart
        if (group := draw_chart(chart, evaluation.summary))
        for one in group.charts
    }
    return {"evaluation.md": evaluation_markdown(evaluation), **pictures}


def evaluation_markdown(evaluation: Evaluation) -> str:
    """Return the document."""
    parts = [f"# {_cell(title_of(evaluation.case))}", f"    {evaluation.command}"]
    for title, items in sections_of(evaluation):
        parts += [f"## {title}"] if title else []
        for item in items:
            match item:
                case str():
                    parts.append(_text(item))
                case TextTable():
                    parts += _table(item)
                case Chart():
                    parts += _charts(item, evaluation)
    return "\n\n".join(parts) + "\n"


def _charts(chart: Chart, evaluation: Evaluation) -> Iterator[str]:
    if group := draw_chart(chart, evaluation.summary):
        yield f"**{_cell(group.title)}**"
        for one in group.charts:
            yield f"![{_cell(one.title)}]({_path(one.name)})"
        yield _text(group.note)


def _path(name: str) -> str:
    return f"{_FOLDER}/{name}.svg"


def _table(table: TextTable) -> list[str]:
    lines = [table.head, ["---"] * len(table.head), *table.rows]
    title = [f"**{_cell(table.title)}**"] if table.title else []
    return [*title, "\n".join(f"| {' | '.join(map(_cell, line))} |" for line in lines)]


def _text(words: str) -> str:
    """Return what Markdown shows as it stands, whoever wrote it."""
    return words.replace("<", "&lt;")


def _cell(words: str) -> str:
    return " ".join(_text(words).replace("|", "\\|").split())
