"""The threshold controller: how long must a prompt be to leave the hub, given what the links carry right now?

A bounded multiplicative controller (section 3.4.3 of the paper), one call of `step` an interval. All that pushes back
is put on one scale, percent:

    utilisation  traffic / effective capacity, or the share of time in which data waited, whichever is more
    drain        unsent bytes / effective capacity;      2 s of it count as 100 %
    queue        prefills waiting per Ready instance;    4 of them count as 100 %

The busiest live link decides. Above the high watermark the threshold rises, by up to x1.5 an interval at 100 %; below
the low one it falls, by down to x0.7 at 0 %; between the two it holds. Three things make this hard:

- A link that got narrower looks *idle* beside its declared capacity: it carries 5 of 100 Mbit/s because it can carry
  no more. So capacity is what the link was seen to deliver while data waited for it. When nothing waits there is
  nothing to see: the last estimate is held and probed upward by a tenth an interval, as far as the declared capacity.
- Rates are averages over a window, so the link's answer to a move comes late. A fall waits until the window has left
  the last rise behind, and a rise needs a prompt that was offloaded within the window: once none is, a higher
  threshold changes nothing but the time it takes to come back. Nothing moves twice on one sample.
- Metrics lie. A figure that is no number, negative or infinite counts as not measured. Without measurements the
  threshold holds, and goes back to the policy's own `tokens` after `stale_after_seconds`. A link that alone went
  silent is dead (one lost scrape is not silence), and so is one whose cluster is unreachable or has no Ready
  instance: nothing is offloaded over it from this step on.
"""

import math
from typing import Literal

import msgspec

from prfaas.wire.control import Bandwidth
from prfaas.wire.routes import LinkWatermarks, Threshold

RISE_FACTOR = 1.5
FALL_FACTOR = 0.7
PROBE_FACTOR = 1.1
SATURATED_DRAIN_SECONDS = 2.0
SATURATED_QUEUE_PER_INSTANCE = 4.0
MIN_BACKLOGGED_FRACTION = 0.02  # below this too little data waited to say what the link can deliver
MIN_RISE_FROM_TOKENS = 64.0  # from where a threshold of 0, which no factor moves, starts to rise
MAX_PERCENT = 1000.0
SILENT_AFTER_SECONDS = 1.5  # a busy worker may miss one scrape of a second; then the link would flap

LinkState = Literal["Alive", "Unreachable", "NoReadyInstance", "Silent"]
MetricsState = Literal["Fresh", "Held", "Stale"]


class LinkSample(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured of one link. Anything may be absurd; `usable` says what of it is believed."""

    sampled_at_seconds: float
    """When the newest sample was taken, by the measuring system's clock; only told apart from the one before."""
    age_seconds: float
    traffic_mbps: float | None = None
    delivery_mbps: float | None = None
    """Rate of delivery over the time in which data waited; None: none did."""
    backlogged_fraction: float = 0.0
    """Share of wall time in which data waited, 0 to 1."""
    unsent_bytes: float = 0.0
    waiting_prefills: float = 0.0


class LinkFacts(msgspec.Struct, frozen=True, kw_only=True):
    """One link: what the routing table says of it, and its sample. None: no instance there was measured."""

    cluster: str
    capacity_mbps: float
    reachable: bool
    ready_instances: int
    sample: LinkSample | None


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """Everything one step depends on. `now_seconds` is this process's monotonic clock."""

    now_seconds: float
    links: tuple[LinkFacts, ...]
    hub_measured: bool
    """Fresh samples of the hub came in: a link without any is then dead, not merely unseen."""
    recent_offloads: int | None
    """Prompts offloaded within the last `window_seconds`; None: not known."""


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """The policy's part."""

    threshold: Threshold
    watermarks: LinkWatermarks
    stale_after_seconds: int

    @property
    def window_seconds(self) -> int:
        """The window of rates; follows `stale_after_seconds`, which a site that scrapes seldom has to raise anyway."""
        return max(5, self.stale_after_seconds // 2)


class LinkMemory(msgspec.Struct, frozen=True, kw_only=True):
    """What is remembered of one link from step to step."""

    cluster: str
    declared_mbps: float
    effective_mbps: float
    utilisation_percent: float | None
    sampled_at_seconds: float | None
    measured_at_seconds: float
    """When, by our clock, a new sample came last, or the link was first known."""
    heard_at_seconds: float
    """When, by our clock, there was a sample at all; -inf: never."""


class State(msgspec.Struct, frozen=True, kw_only=True):
    """What one step hands to the next. `tokens` keeps its fraction, so that small thresholds move too."""

    tokens: float
    bandwidth: Bandwidth = "Scarce"
    risen_at_seconds: float = -math.inf
    links: tuple[LinkMemory, ...] = ()


class LinkReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a step thinks of one link."""

    cluster: str
    state: LinkState
    effective_mbps: float
    utilisation_percent: float | None
    """0 to 1000, of the effective capacity; None: never measured."""


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """What follows from one step. `offload_clusters` are the clusters with a live link, sorted."""

    state: State
    tokens: int
    bandwidth: Bandwidth
    offload_clusters: tuple[str, ...]
    links: tuple[LinkReport, ...]
    metrics: MetricsState
    """Fresh: every live link brought a new sample. Held: one did not. Stale: one did not for `stale_after_seconds`."""
    reason: str


class _Link(msgspec.Struct, frozen=True, kw_only=True):
    """One link within a step. Pressures are None when it brought nothing new."""

    report: LinkReport
    memory: LinkMemory
    link_percent: float | None
    queue_percent: float | None


def initial_state(config: Config) -> State:
    """Return the state before the first step: the policy's own threshold, and nothing known of any link."""
    return State(tokens=float(config.threshold.tokens))


def step(config: Config, state: State, facts: Facts) -> Step:
    """Judge every link, then move the threshold."""
    remembered = {memory.cluster: memory for memory in state.links}
    links = [_judge(config, facts, link, remembered.get(link.cluster)) for link in facts.links]
    alive = [link for link in links if link.report.state == "Alive"]
    metrics = _metrics_state(config, facts, alive)
    tokens, bandwidth, reason = _decide(config, state, facts, alive, metrics)
    threshold = config.threshold
    bounded = min(max(tokens, float(threshold.min_tokens)), float(threshold.max_tokens))
    offload = () if threshold.mode == "Disabled" else tuple(sorted(link.report.cluster for link in alive))
    return Step(
        state=State(
            tokens=bounded,
            bandwidth=bandwidth,
            risen_at_seconds=facts.now_seconds if bounded > state.tokens else state.risen_at_seconds,
            links=tuple(link.memory for link in links),
        ),
        tokens=threshold.tokens if threshold.mode != "Auto" else round(bounded),
        bandwidth=bandwidth,
        offload_clusters=offload,
        links=tuple(link.report for link in links),
        metrics=metrics,
        reason=reason if threshold.mode == "Auto" else f"threshold mode is {threshold.mode}",
    )


def _decide(
    config: Config, state: State, facts: Facts, alive: list[_Link], metrics: MetricsState
) -> tuple[float, Bandwidth, str]:
    """Return the next threshold before its bounds, the bandwidth, and why."""
    if metrics == "Stale":
        tokens = config.threshold.tokens
        reason = f"no new measurement for {config.stale_after_seconds} s: back to {tokens} tokens"
        return float(tokens), "Scarce", reason
    if not alive:
        return state.tokens, state.bandwidth, "no link is alive: nothing is offloaded"
    measured = [link for link in alive if link.link_percent is not None]
    if not measured:
        return state.tokens, state.bandwidth, "no new measurement: held"
    busiest = max(measured, key=_pressure_percent)
    bandwidth = _bandwidth(config, state.bandwidth, max(link.link_percent or 0.0 for link in measured))
    tokens, move = _move(config, state, facts, _pressure_percent(busiest))
    report = busiest.report
    reason = (
        f"link {report.cluster} under {_pressure_percent(busiest):.0f}% pressure, "
        f"{report.utilisation_percent or 0.0:.0f}% of {report.effective_mbps:.1f} Mbit/s used: {move}"
    )
    return tokens, bandwidth, reason


def _move(config: Config, state: State, facts: Facts, pressure_percent: float) -> tuple[float, str]:
    """Return the threshold after one move under this pressure, and the word for it. Monotone in the pressure."""
    low, high = config.watermarks.low_percent, config.watermarks.high_percent
    if pressure_percent > high:
        if facts.recent_offloads == 0:
            return state.tokens, "held, nothing was offloaded lately"
        share = min(1.0, (pressure_percent - high) / max(1.0, 100.0 - high))
        return max(state.tokens, MIN_RISE_FROM_TOKENS) * (1.0 + (RISE_FACTOR - 1.0) * share), "raised"
    if pressure_percent < low:
        if facts.now_seconds - state.risen_at_seconds < config.window_seconds:
            return state.tokens, "held, it rose a moment ago"
        share = (low - pressure_percent) / low
        return state.tokens * (1.0 - (1.0 - FALL_FACTOR) * share), "lowered"
    return state.tokens, "held between the watermarks"


def _bandwidth(config: Config, before: Bandwidth, link_percent: float) -> Bandwidth:
    """Return Scarce above the high watermark, Abundant below the low one, and what it was between them."""
    if link_percent > config.watermarks.high_percent:
        return "Scarce"
    return "Abundant" if link_percent < config.watermarks.low_percent else before


def _metrics_state(config: Config, facts: Facts, alive: list[_Link]) -> MetricsState:
    """Say whether the live links, or without any the hub, were measured just now."""
    if not alive:
        return "Fresh" if facts.hub_measured else "Held"
    age_seconds = max(facts.now_seconds - link.memory.measured_at_seconds for link in alive)
    if age_seconds > config.stale_after_seconds:
        return "Stale"
    return "Fresh" if all(link.link_percent is not None for link in alive) else "Held"


def _judge(config: Config, facts: Facts, link: LinkFacts, memory: LinkMemory | None) -> _Link:
    """Return everything one step thinks of one link."""
    declared_mbps = max(1.0, _number(link.capacity_mbps) or 1.0)
    before = memory if memory and memory.declared_mbps == declared_mbps else _unknown(link, declared_mbps, facts)
    if _heard(config, link):
        before = msgspec.structs.replace(before, heard_at_seconds=facts.now_seconds)
    state = _link_state(facts, link, before)
    if state != "Alive":  # its clock starts again when it comes back: it was not expected to be measured meanwhile
        before = msgspec.structs.replace(before, measured_at_seconds=facts.now_seconds)
    sample = usable(link.sample)
    traffic_mbps = None if sample is None else sample.traffic_mbps
    if (
        state != "Alive"
        or sample is None
        or traffic_mbps is None
        or sample.age_seconds > config.stale_after_seconds
        or sample.sampled_at_seconds == before.sampled_at_seconds
    ):
        return _Link(report=_report(before, state), memory=before, link_percent=None, queue_percent=None)
    effective_mbps = effective_capacity_mbps(sample, declared_mbps, before.effective_mbps)
    utilisation = min(MAX_PERCENT, 100.0 * max(traffic_mbps / effective_mbps, sample.backlogged_fraction))
    drain_seconds = sample.unsent_bytes * 8 / 1e6 / effective_mbps
    memory = LinkMemory(
        cluster=link.cluster,
        declared_mbps=declared_mbps,
        effective_mbps=effective_mbps,
        utilisation_percent=utilisation,
        sampled_at_seconds=sample.sampled_at_seconds,
        measured_at_seconds=facts.now_seconds,
        heard_at_seconds=facts.now_seconds,
    )
    return _Link(
        report=_report(memory, state),
        memory=memory,
        link_percent=max(utilisation, 100.0 * drain_seconds / SATURATED_DRAIN_SECONDS),
        queue_percent=100.0 * sample.waiting_prefills / link.ready_instances / SATURATED_QUEUE_PER_INSTANCE,
    )


def _unknown(link: LinkFacts, declared_mbps: float, facts: Facts) -> LinkMemory:
    """Return the memory of a link that was never measured, or whose declared capacity was changed."""
    return LinkMemory(
        cluster=link.cluster,
        declared_mbps=declared_mbps,
        effective_mbps=declared_mbps,
        utilisation_percent=None,
        sampled_at_seconds=None,
        measured_at_seconds=facts.now_seconds,
        heard_at_seconds=-math.inf,
    )


def _heard(config: Config, link: LinkFacts) -> bool:
    """Tell whether some instance there has a sample that is not stale."""
    return link.sample is not None and link.sample.age_seconds <= config.stale_after_seconds


def _link_state(facts: Facts, link: LinkFacts, memory: LinkMemory) -> LinkState:
    """Say whether prompts may cross the link at all."""
    if not link.reachable:
        return "Unreachable"
    if link.ready_instances < 1:
        return "NoReadyInstance"
    silent = facts.now_seconds - memory.heard_at_seconds > SILENT_AFTER_SECONDS
    return "Silent" if silent and facts.hub_measured else "Alive"


def effective_capacity_mbps(sample: LinkSample, declared_mbps: float, held_mbps: float) -> float:
    """Return what the link can carry now, at most what was declared; `sample` is usable and has a traffic.

    While data waits it is the rate of delivery plus what others carry over the same link (traffic beyond our own data
    that waited), else the held estimate, probed upward. A link that delivers nothing keeps a thousandth.
    """
    traffic_mbps = sample.traffic_mbps or 0.0
    if sample.delivery_mbps is not None and sample.backlogged_fraction >= MIN_BACKLOGGED_FRACTION:
        others_mbps = max(0.0, traffic_mbps - sample.delivery_mbps * sample.backlogged_fraction)
        seen_mbps = sample.delivery_mbps + others_mbps
    elif sample.unsent_bytes > 0:
        seen_mbps = held_mbps  # data waits, but the window has not seen it move yet
    else:
        seen_mbps = max(held_mbps * PROBE_FACTOR, traffic_mbps)
    return min(declared_mbps, max(seen_mbps, declared_mbps / 1000))


def usable(sample: LinkSample | None) -> LinkSample | None:
    """Return the sample with every figure either sensible or absent; None when it says nothing of its own time."""
    if sample is None or not math.isfinite(sample.sampled_at_seconds) or not math.isfinite(sample.age_seconds):
        return None
    return LinkSample(
        sampled_at_seconds=sample.sampled_at_seconds,
        age_seconds=sample.age_seconds,
        traffic_mbps=_number(sample.traffic_mbps),
        delivery_mbps=_number(sample.delivery_mbps),
        backlogged_fraction=min(1.0, _number(sample.backlogged_fraction) or 0.0),
        unsent_bytes=_number(sample.unsent_bytes) or 0.0,
        waiting_prefills=_number(sample.waiting_prefills) or 0.0,
    )


def _number(value: float | None) -> float | None:
    """Return a finite figure of at least 0, or None."""
    return value if value is not None and math.isfinite(value) and value >= 0 else None


def _pressure_percent(link: _Link) -> float:
    return max(link.link_percent or 0.0, link.queue_percent or 0.0)


def _report(memory: LinkMemory, state: LinkState) -> LinkReport:
    return LinkReport(
        cluster=memory.cluster,
        state=state,
        effective_mbps=memory.effective_mbps,
        utilisation_percent=memory.utilisation_percent,
    )
