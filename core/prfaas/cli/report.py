"""The page of `prfaas plan --html`: a plan for those who read neither code nor tables.

It opens with the verdict, shows the system and what each link and load would do, and ends with what is assumed and what
each word means. It is one file that loads nothing, on dark ground, light ground and paper. All names come from people's
files: every cell and every word of a chart is escaped.
"""

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Final

from prfaas.capacity import optimum, ttft
from prfaas.capacity.comparison import Comparison
from prfaas.capacity.planfile import PlanFile
from prfaas.capacity.profile import cache_bytes, prefill_seconds
from prfaas.capacity.sweep import LinkPoint, over_links
from prfaas.capacity.system import HubPool, OffloadPool, System
from prfaas.capacity.verdict import LengthClass, Verdict
from prfaas.cli.chart import Axis, Mark, draw_bars, draw_lines
from prfaas.errors import ConfigError

LENGTHS: Final = (1024, 8192, 32_768, 131_072)
"""Tokens at which the page shows what a prefill takes."""
LOADS: Final = tuple(place / 20 for place in range(1, 20))
WORDS: Final = (
    ("hub", "The cluster that answers: all decoding happens here."),
    ("offload pool", "Instances elsewhere that only prefill for the hub. Their caches cross a link."),
    ("instance", "One copy of the model, on one or several GPUs."),
    ("prefill, decode", "Reading a prompt, and writing its answer token by token."),
    ("cache", "What prefill hands to decode: rows for each token, and a state whose size is fixed."),
    ("threshold t", "Longer prompts are prefilled away, shorter ones in the hub."),
    ("TTFT", "Time to the first token: prefill, transfer, and, where the page says so, waits."),
    ("P90", "The time that nine of ten requests do not exceed."),
    ("load", "Requests that arrive, as a share of the most that the system serves."),
    ("Lambda_max", "The most requests a second that a system serves."),
    ("N_p, N_d", "Instances of the hub that prefill and that decode."),
    ("hub alone", "The hub as it stands, without any offload pool."),
    ("homogeneous", "As many instances as in the plan, all in the hub and of its first kind."),
    ("naive", "The same system, which offloads every prompt."),
    ("PrfaaS-PD", "The plan: the best threshold and the best split of the hub."),
    ("fractional", "A plan whose instances divide their time between prefill and decode."),
)
STYLE: Final = """
:root { color-scheme: light dark; --ground: #fff; --ink: #1a1f2b; --soft: #5b6472; --rule: #dfe3ea; --panel: #f4f6fa;
  --c0: #1d5fd1; --c1: #c2560c; --c2: #4b7a1f; --c3: #7a4fb5; }
@media (prefers-color-scheme: dark) { :root { --ground: #12161f; --ink: #e6e9ef; --soft: #9aa4b5; --rule: #2c3444;
  --panel: #1b212d; --c0: #6ea8ff; --c1: #ff9d5c; --c2: #9ccc65; --c3: #c3a0f5; } }
@media print { :root { --ground: #fff; --ink: #000; --soft: #444; --rule: #ccc; --panel: #fff; --c0: #1d5fd1;
  --c1: #c2560c; --c2: #4b7a1f; --c3: #7a4fb5; } }
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
.word { fill: var(--ink); font: 12px system-ui, "Segoe UI", "DejaVu Sans", sans-serif; }
.grid { stroke: var(--rule); }
.mark { stroke: var(--soft); stroke-dasharray: 3 3; }
.line { fill: none; stroke: currentColor; stroke-width: 2.25; stroke-linejoin: round; }
.bar { fill: currentColor; }
.s0 { color: var(--c0); } .s1 { color: var(--c1); } .s2 { color: var(--c2); } .s3 { color: var(--c3); }
.line.s1 { stroke-dasharray: 7 4; } .line.s2 { stroke-dasharray: 2 3; } .line.s3 { stroke-dasharray: 9 3 2 3; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; margin: .5rem 0 1rem; font-variant-numeric: tabular-nums; }
th, td { padding: .35rem .6rem; border-bottom: 1px solid var(--rule); text-align: right; vertical-align: top; }
th { font-weight: 600; color: var(--soft); font-size: .85rem; }
th:first-child, td:first-child, .left { text-align: left; }
tr { break-inside: avoid; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .25rem 1.25rem; }
dt { font-weight: 600; } dd { margin: 0; }
"""


def render(name: str, file: PlanFile, result: Comparison) -> str:
    """Return the page of a plan; `name` says what was planned."""
    parts = [
        f"<h1>Plan of {escape(name)}</h1>",
        _verdict(result.verdict),
        *_described(file),
        *_over_links(file),
        *_first_tokens(file, result.verdict.classes),
        *_systems(result),
        *_assumed(file, result),
        "<h2>Words</h2>",
        "<dl>" + "".join(f"<dt>{escape(word)}</dt><dd>{escape(what)}</dd>" for word, what in WORDS) + "</dl>",
    ]
    head = (
        '<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width">\n<title>Plan of {escape(name)}</title>\n'
    )
    return f"{head}<style>{STYLE}</style>\n" + "\n".join(parts) + "\n</html>\n"


def _verdict(verdict: Verdict) -> str:
    cards = [
        (f"{verdict.gain:+.0%}", "requests a second"),
        (_or_none(verdict.from_tokens, "{:,} tokens"), "prompts longer than this go away"),
        (_or_none(verdict.from_mbps, lambda mbps: _link(mbps)), "the link from which it pays"),
        (verdict.limit, "what limits the plan"),
    ]
    shown = "".join(f'<div class="card"><b>{escape(value)}</b>{escape(what)}</div>' for value, what in cards)
    return f'<p class="verdict">{escape(verdict.sentence)}</p>\n<div class="row">{shown}</div>'
