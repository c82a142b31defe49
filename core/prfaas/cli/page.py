"""The parts that pages share: one file that loads nothing, on dark ground, light ground and paper. Whatever comes from
people or servers is escaped.
"""

from collections.abc import Iterable, Sequence
from html import escape
from typing import Final

_COLOURS: Final = """
:root { color-scheme: light dark; --ground: #fff; --ink: #1a1f2b; --soft: #5b6472; --rule: #dfe3ea; --panel: #f4f6fa;
  --c0: #1d5fd1; --c1: #c2560c; --c2: #4b7a1f; --c3: #7a4fb5;
  --c4: #0f8588; --c5: #b3307a; --c6: #8a6d1c; --c7: #7d8794; }
@media (prefers-color-scheme: dark) { :root { --ground: #12161f; --ink: #e6e9ef; --soft: #9aa4b5; --rule: #2c3444;
  --panel: #1b212d; --c0: #6ea8ff; --c1: #ff9d5c; --c2: #9ccc65; --c3: #c3a0f5;
  --c4: #4fc4c7; --c5: #f07fbf; --c6: #dcb95a; --c7: #8d97a6; } }
@media print { :root { --ground: #fff; --ink: #000; --soft: #444; --rule: #ccc; --panel: #fff; --c0: #1d5fd1;
  --c1: #c2560c; --c2: #4b7a1f; --c3: #7a4fb5; --c4: #0f8588; --c5: #b3307a; --c6: #8a6d1c; --c7: #7d8794; } }
"""
_CHART_STYLE: Final = """
.word { fill: var(--ink); font: 12px system-ui, "Segoe UI", "DejaVu Sans", sans-serif; }
.grid { stroke: var(--rule); }
.mark { stroke: var(--soft); stroke-dasharray: 3 3; }
.line { fill: none; stroke: currentColor; stroke-width: 2.25; stroke-linejoin: round; }
.bar { fill: currentColor; }
.s0 { color: var(--c0); } .s1 { color: var(--c1); } .s2 { color: var(--c2); } .s3 { color: var(--c3); }
.s4 { color: var(--c4); } .s5 { color: var(--c5); } .s6 { color: var(--c6); } .s7 { color: var(--c7); }
.line.s1 { stroke-dasharray: 7 4; } .line.s2 { stroke-dasharray: 2 3; } .line.s3 { stroke-dasharray: 9 3 2 3; }
.line.s4 { stroke-dasharray: 12 3; } .line.s5 { stroke-dasharray: 1 4; }
.sign { fill: none; stroke: currentColor; stroke-width: 1.5; }
.span { fill: none; stroke: var(--ink); stroke-width: 1.5; }
"""
_PAGE_STYLE: Final = """
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 62rem; padding: 2rem 1.25rem 4rem; background: var(--ground); color: var(--ink);
  font: 15px/1.55 system-ui, "Segoe UI", "DejaVu Sans", sans-serif; print-color-adjust: exact; }
h1 { font-size: 1.05rem; font-weight: 600; color: var(--soft); margin: 0 0 .75rem; }
h2 { font-size: 1.15rem; margin: 2.5rem 0 .25rem; break-after: avoid; }
h3 { font-size: .95rem; margin: 0 0 .25rem; }
p { margin: .25rem 0 .75rem; max-width: 48rem; }
.soft { color: var(--soft); font-size: .9rem; }
.verdict { font-size: 1.3rem; line-height: 1.4; max-width: none; margin: 0 0 1.25rem; padding-left: 1rem;
  border-left: 4px solid var(--c0); }
.row { display: grid; grid-template-columns: repeat(auto-fit, minmax(12rem, 1fr)); gap: .75rem; }
.row.wide { grid-template-columns: repeat(auto-fit, minmax(24rem, 1fr)); gap: 1.5rem; margin-top: 1rem; }
.card { background: var(--panel); border: 1px solid var(--rule); border-radius: 8px; padding: .7rem .9rem; }
.card b { display: block; font-size: 1.35rem; font-weight: 650; }
figure { margin: 0; break-inside: avoid; }
svg { width: 100%; height: auto; display: block; overflow: visible; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; margin: .5rem 0 1rem; font-variant-numeric: tabular-nums; }
th, td { padding: .35rem .6rem; border-bottom: 1px solid var(--rule); text-align: right; vertical-align: top; }
th { font-weight: 600; color: var(--soft); font-size: .85rem; }
th:first-child, td:first-child { text-align: left; white-space: nowrap; }
.words { width: auto; } .words :is(th, td) { text-align: left; white-space: normal; padding-right: 2rem; }
tr { break-inside: avoid; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .25rem 1.25rem; }
dt { font-weight: 600; } dd { margin: 0; }
"""


def wrap_page(title: str, *parts: str) -> str:
    """Return a page with this title, of parts that are HTML."""
    head = (
        '<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width">\n<title>{escape(title)}</title>\n'
    )
    return (
        f"{head}<style>{_COLOURS}{_CHART_STYLE}{_PAGE_STYLE}</style>\n"
        + "\n".join((f"<h1>{escape(title)}</h1>", *parts))
        + "\n</html>\n"
    )


def picture_of(drawing: str) -> str:
    """Return a chart of `prfaas.cli.chart` as a file of its own: it has the colours of a page, and its ground."""
    shape, body = drawing.removeprefix("<svg ").split(">", 1)
    ground = '<rect width="100%" height="100%" style="fill: var(--ground)"/>'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {shape}>\n<style>{_COLOURS}{_CHART_STYLE}</style>\n{ground}{body}\n'
    )


def make_table(head: Sequence[str], rows: Iterable[Sequence[str]], are_words: bool = False) -> str:
    """Return a table of text; words are not aligned as numbers are."""
    lines = ["<tr>" + "".join(f"<th>{escape(cell)}</th>" for cell in head) + "</tr>"]
    lines += ["<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows]
    kind = ' class="words"' if are_words else ""
    return f'<div class="scroll"><table{kind}>' + "\n".join(lines) + "</table></div>"
