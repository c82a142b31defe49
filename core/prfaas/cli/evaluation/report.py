"""The page of a chapter: one file of HTML that loads nothing, with the document's sections, and charts."""

from html import escape

from prfaas.cli.evaluation.content import Chapter, ChartGroup, ReportSection, TextTable, title_of
from prfaas.cli.page import make_table, wrap_page


def page_of(chapter: Chapter) -> str:
    """Return the page."""
    (_, (verdict, *opening)), *sections = chapter.sections
    parts = [f'<p class="verdict">{escape(str(verdict))}</p>']
    for one in (ReportSection("", opening), *sections):
        parts += [f"<h2>{escape(one.title)}</h2>"] if one.title else []
        parts += map(_shown, one.items)
    return wrap_page(title_of(chapter.case), *parts)


def _shown(item: str | TextTable | ChartGroup) -> str:
    match item:
        case str():
            return f"<p>{escape(item)}</p>"
        case TextTable():
            return _show_table(item)
        case ChartGroup():
            return _show_charts(item)


def _show_table(table: TextTable) -> str:
    """Return a table under its title."""
    title = f"<h3>{escape(table.title)}</h3>" if table.title else ""
    return title + make_table(table.head, table.rows, are_words=table.are_words)


def _show_charts(group: ChartGroup) -> str:
    """Return charts under their title, beside each other if there are several."""
    one_alone = len(group.charts) == 1
    titles = ["" if one_alone else f"<h3>{escape(one.title)}</h3>\n" for one in group.charts]
    figures = [f"<figure>{title}{one.drawing}</figure>" for title, one in zip(titles, group.charts, strict=True)]
    row = figures if one_alone else ['<div class="row wide">', *figures, "</div>"]
    note = f'<p class="soft">{escape(group.note)}</p>'
    return "\n".join([f"<h3>{escape(group.title)}</h3>", *row, note])
