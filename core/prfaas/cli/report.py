"""The page of `prfaas plan --html`: a plan for those who read neither code nor tables.

It opens with the verdict, shows the system and what each link and load would do, and ends with what is assumed and what
each word means. All names come from people's files: every cell and every word of a chart is escaped.
"""

from collections.abc import Iterable, Sequence
from html import escape
from typing import Final

from prfaas.capacity.builtin import read_builtin
from prfaas.capacity.comparison import Comparison
from prfaas.capacity.planfile import PlanFile
from prfaas.capacity.profile import prefill_seconds
from prfaas.capacity.system import HubPool, OffloadPool
from prfaas.capacity.verdict import LengthClass, rounded_up
from prfaas.cli.chart import Axis, Mark, draw_bars, draw_lines
from prfaas.cli.page import make_table, wrap_page

LENGTHS: Final = (1024, 8192, 32_768, 131_072)
"""Tokens at which the page shows what a prefill takes."""
DRAWN: Final = {"prfaas_pd": "PrfaaS-PD", "hub_alone": "hub alone", "homogeneous": "homogeneous"}
"""The systems whose times are drawn, first the one that the page is about."""
ASSUMED: Final = (
    "Requests arrive at random, without bursts, and instances do not fail.",
    "Prompts are as long as said above. If more of them is cached, fewer and shorter ones are left to prefill.",
    "A decode step takes as long as that of a full batch.",
    "Links carry what is said of them, and nothing else uses them.",
)
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


def render(name: str, file: PlanFile, result: Comparison, systems: Sequence[Sequence[str]]) -> str:
    """Return the page of a plan. `name` says what was planned, `systems` is the table that the command prints."""
    parts = [
        *_verdict(result),
        "<h2>The system</h2>",
        *_described(file),
        *_over_links(result),
        *_first_tokens(result),
        "<h2>The systems compared</h2>",
        "<p>Every column serves the same requests. Times are without waits.</p>",
        make_table(systems[0], systems[1:]),
        "<h2>What is assumed</h2>",
        "<ul>" + "".join(f"<li>{escape(one)}</li>" for one in (*result.notes, *ASSUMED)) + "</ul>",
        "<h2>Words</h2>",
        "<dl>" + "".join(f"<dt>{escape(word)}</dt><dd>{escape(what)}</dd>" for word, what in WORDS) + "</dl>",
    ]
    return wrap_page(f"Plan of {name}", *parts)


def _verdict(result: Comparison) -> list[str]:
    verdict = result.verdict
    cards = [
        (f"{verdict.gain:+.0%}", "requests a second"),
        (f"{verdict.from_tokens:,} tokens" if verdict.from_tokens else "no prompt", "go away, from this length on"),
        (verdict.limit, "is full first"),
    ]
    if result.hub_alone and result.prfaas_pd:
        link = _rate(rounded_up(verdict.from_mbps)) if verdict.from_mbps else "no link"
        cards.insert(2, (link, "pays, from this rate on"))
    shown = "".join(f'<div class="card"><b>{escape(value)}</b>{escape(what)}</div>' for value, what in cards)
    return [f'<p class="verdict">{escape(verdict.sentence)}</p>', f'<div class="row">{shown}</div>']


def _described(file: PlanFile) -> list[str]:
    """Return the tables of pools and links, and the load in a sentence."""
    system, workload = file.system, file.workload
    lengths = [f"{tokens:,} tokens, s" for tokens in LENGTHS]
    head = ("pool", "where", "instances", "batch, step", "state, MB", "bytes a token", *lengths)
    rows = [(one.name, f"behind {one.link}", *_instance(one, "only prefills")) for one in system.offload]
    rows += [
        (one.name, "hub", *_instance(one, f"{one.max_batch}, {1000 * one.step_seconds:.3g} ms")) for one in system.hub
    ]
    used = {link.name: [one.name for one in system.offload if one.link == link.name] for link in system.links}
    links = [(one.name, _rate(one.capacity_mbps), ", ".join(used[one.name])) for one in system.links]
    middle, long = workload.quantile(0.5), workload.quantile(0.9)
    return [
        f"<p>Prompts have {workload.mean_tokens:,.0f} tokens in the mean that no cache holds; half have at most "
        f"{middle:,}, nine of ten at most {long:,}. Answers have {system.output_tokens:,.0f} tokens. The times are of "
        "a prefill that has its instance to itself.</p>",
        make_table(head, rows),
        _sources(file),
        make_table(("link", "rate", "used by"), links, are_words=True) if links else "",
    ]


def _instance(pool: OffloadPool | HubPool, decoding: str) -> list[str]:
    profile = pool.profile
    sizes = [f"{profile.state_bytes / 1e6:,.1f}", f"{profile.token_bytes:,}"]
    return [str(pool.instances), decoding, *sizes, *(_seconds(prefill_seconds(profile, tokens)) for tokens in LENGTHS)]


def _over_links(result: Comparison) -> list[str]:
    """Return what faster and slower links would do; nothing where nothing is offloaded."""
    if not result.over_links:
        return []
    across = Axis("Gbit/s of all links together", is_log=True)
    now = Mark(next(one.mbps for one in result.over_links if one.scale == 1) / 1000, "now")
    gains = [(one.mbps / 1000, one.gain) for one in result.over_links]
    lengths = [(one.mbps / 1000, one.threshold_tokens) for one in result.over_links if one.threshold_tokens]
    ends = "" if len(lengths) == len(gains) else " Where the second line has no point, all prompts go the same way."
    base = "hub alone" if result.hub_alone else "homogeneous"
    gain, length = Axis(f"requests/s more than {base}", shown="{:+.0%}".format), Axis("threshold, tokens", is_log=True)
    return [
        "<h2>What another link would do</h2>",
        "<p>All links grow or shrink together; the rest of the system stays, and is planned anew at each point. Caches "
        f"of half the bytes are worth a link twice as fast.{ends}</p>",
        '<div class="row wide">',
        _figure("Gain", draw_lines(across, gain, {"gain": gains}, now)),
        _figure("From which length prompts go away", draw_lines(across, length, {"threshold": lengths}, now)),
        "</div>",
    ]


def _first_tokens(result: Comparison) -> list[str]:
    """Return the times to the first token, by load and by length."""
    by_load = {
        title: [(one.arrivals_per_second, one.ttft_mean_seconds) for one in result.queueing[name]]
        for name, title in DRAWN.items()
        if name in result.queueing
    }
    charts = [_figure("By load", draw_lines(Axis("requests/s"), Axis("mean TTFT with waits, s"), by_load))]
    rate = f"{result.verdict.arrivals_per_second:.2f} requests/s"
    classes = result.verdict.classes
    if result.prfaas_pd is not None:
        away = {"PrfaaS-PD": [one.ttft_seconds for one in classes], "hub alone": _of_hub(classes)}
        drawn = {name: values for name, values in away.items() if values}
        title = Axis("mean TTFT with waits, s", shown="{:.3g}".format)
        charts.append(_figure(f"By length, at {rate}", draw_bars(title, [_span(one) for one in classes], drawn)))
    return [
        "<h2>How long users wait for the first token</h2>",
        "<p>Estimated for arrivals at random. A lone prompt may be slower away than in the hub, though the system "
        "serves more: the table says so.</p>",
        '<div class="row wide">',
        *charts,
        "</div>",
        _by_length(classes, rate) if result.prfaas_pd is not None else "",
    ]


def _of_hub(classes: Iterable[LengthClass]) -> list[float]:
    return [one.hub_ttft_seconds for one in classes if one.hub_ttft_seconds is not None]


def _by_length(classes: Iterable[LengthClass], rate: str) -> str:
    head = ("tokens", "of all prompts", "go away")
    head += tuple(f"{who}, {when}" for when in (rate, "alone") for who in ("hub alone", "PrfaaS-PD"))
    return make_table(
        head,
        [
            (
                _span(one),
                f"{one.share:.1%}",
                f"{one.offloaded:.0%}",
                *map(_seconds, (one.hub_ttft_seconds, one.ttft_seconds, one.lone_hub_seconds, one.lone_seconds)),
            )
            for one in classes
        ],
    )


def _sources(file: PlanFile) -> str:
    """Return a table of where each pool's profile is from."""
    rows: list[tuple[str, str]] = []
    for pool in (*file.system.offload, *file.system.hub):
        if pool.builtin:
            one = read_builtin(pool.name, pool.builtin)
            what = f"{one.model} in {one.precision} on {one.devices} x {one.device.upper()}, {one.parallelism}"
            rows.append((pool.name, f"{what} (built in: {one.name}); {one.source}"))
        elif pool.profile.samples:
            rows.append((pool.name, f"{pool.profile.samples} points, up to {pool.profile.max_tokens:,} tokens"))
        else:
            rows.append((pool.name, "a formula in the file; no measurement of it is known"))
    return make_table(("pool", "where its prefill times are from"), rows, are_words=True)


def _span(one: LengthClass) -> str:
    return f"{one.from_tokens:,} to {one.to_tokens:,}"


def _rate(mbps: float) -> str:
    return f"{mbps / 1000:,.3g} Gbit/s" if mbps >= 1000 else f"{mbps:,.3g} Mbit/s"


def _seconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:,.2f}"


def _figure(title: str, drawing: str) -> str:
    return f"<figure><h3>{escape(title)}</h3>\n{drawing}</figure>"
