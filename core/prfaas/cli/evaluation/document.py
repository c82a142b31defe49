"""The document of evaluations, such as docs/understand/evaluation.md: the pages' sections as Markdown, with their
charts as files beside it.

The first chapter gives the document its title. Each further one is under a title of its own, and its charts have the
name of its case.
"""

from collections.abc import Iterator, Sequence
from typing import Final

from prfaas.cli.evaluation.content import Chapter, ChartGroup, TextTable, title_of
from prfaas.cli.page import picture_of

_FOLDER: Final = "evaluation"


def document_files(chapters: Sequence[Chapter]) -> dict[str, str]:
    """Return the document and its pictures, each by its path beside the document."""
    pictures: dict[str, str] = {}
    parts: list[str] = []
    for place, chapter in enumerate(chapters):
        prefix = f"{chapter.case.name}-" if place else ""
        parts += _chapter(chapter, "##" if place else "#", prefix)
        groups = [item for one in chapter.sections for item in one.items if isinstance(item, ChartGroup)]
        pictures |= {_path(prefix + one.name): picture_of(one.drawing) for group in groups for one in group.charts}
    return {"evaluation.md": "\n\n".join(parts) + "\n", **pictures}


def _chapter(chapter: Chapter, heading: str, prefix: str) -> Iterator[str]:
    yield f"{heading} {_cell(title_of(chapter.case))}"
    yield f"    {chapter.command}"
    for title, items in chapter.sections:
        if title:
            yield f"#{heading} {_cell(title)}"
        for item in items:
            match item:
                case str():
                    yield _text(item)
                case TextTable():
                    yield from _table(item)
                case ChartGroup():
                    yield from _charts(item, prefix)


def _charts(group: ChartGroup, prefix: str) -> Iterator[str]:
    yield f"**{_cell(group.title)}**"
    for one in group.charts:
        yield f"![{_cell(one.title)}]({_path(prefix + one.name)})"
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
