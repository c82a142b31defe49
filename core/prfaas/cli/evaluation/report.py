"""The page of an evaluation: one file of HTML that loads nothing, with the document's sections, and charts."""

from html import escape

from prfaas.cli.evaluation.charts import ChartGroup, draw_chart
from prfaas.cli.evaluation.content import Evaluation, TextTable, title_of
from prfaas.cli.evaluation.sections import Chart, ReportSection, sections_of
from prfaas.cli.page import make_table, wrap_page


def evaluation_page(evaluation: Evaluation) -> str:
    """Return the page."""
    (_, (verdict, *opening)), *sections = sections_of(evaluation)
    parts = [f'<p class="verdict">{escape(str(verdict))}</p>']
    for section in (ReportSection("", tuple(opening)), *sections):
        parts += [f"<h2>{escape(section.title)}</h2>"] if section.title else []
        parts += [_shown(item, evaluation) for item in section.items]
    return wrap_page(title_of(evaluation.case), *parts)


def _shown(item: str | TextTable | Chart, evaluation: Evaluation) -> str:
    match item:
        case str():
            return f"<p>{escape(item)}</p>"
        case TextTable():
            return show_table(item)
        case Chart():
            group = draw_chart(item, evaluation.summary)
            return show_charts(group) if group else ""


def show_table(table: TextTable) -> str:
    """Return a table under its title."""
    title = f"<h3>{escape(table.title)}</h3>" if table.title else ""
    return title + make_table(table.head, table.rows, are_words=table.are_words)


def show_charts(group: ChartGroup) -> str:
    """Return charts under their title, beside each other if there are several."""
    one_alone = len(group.charts) == 1
    titles = ["" if one_alone else f"<h3>{escape(one.title)}</h3>\n" for one in group.charts]
    figures = [f"<figure>{title}{one.drawing}</figure>" for title, one in zip(titles, group.charts, strict=True)]
    row = figures if one_alone else ['<div class="row wide">', *figures, "</div>"]
    note = f'<p class="soft">{escape(group.note)}</p>'
    return "\n".join([f"<h3>{escape(group.title)}</h3>", *row, note])
