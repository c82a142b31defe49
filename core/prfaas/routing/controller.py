"""The threshold controller: moves the length above which prompts leave the hub, by what the links carry now.

One pure step an interval (section 3.4.3 of the paper) makes the threshold from two parts:

    forward    the threshold at which offload and local pools would be equally busy on the lengths that come, and links
               carry no more than the middle between the watermarks (prfaas.routing.feedforward)
    back       above the high watermark the threshold rises, by up to x1.5 an interval at 100 % pressure; below the low
               one it falls, by down to x0.7 at 0 %; between the two it holds (pressures: prfaas.routing.links)

The first is where the second may fall to, and the threshold jumps up at once when it rises. While too few prompts have
come, that is the policy's own `tokens`: an idle link says nothing of what the offload pools can do. Where profiles are
not known, it is the policy's minimum, and feedback alone finds the link's limit.

The hub has a pressure too, of the time that prefills wait there. It may be the worse one: the profiles were wrong, or
more comes than both sides can do. Equal waits are equal pressures: a request does not care where it waits. Where the
hub's is the worse, the threshold falls whatever the link says. A *relief* below 1 lets it go below the optimum. While
the hub's is more than half of the link's, nothing rises. What is taken from a waiting link would wait in the hub, and
the link catches up sooner. For the same reason the forward part keeps off a link only what waits longer there than in
the hub. While anything waits in the hub, nothing rises above what its pools can do as fast as it comes. The longest
prompts would hold them up for all others.

Without these it would swing:

- Rates are means over a window, so the link's answer to a move comes late. A fall waits until the window has left the
  last rise behind, and a rise until it has left a jump behind. A rise needs a prompt that was offloaded within the
  window. Once none is, a higher threshold changes nothing but the time it takes to come back. Nothing moves twice on
  one sample.
- Some loads have no threshold that fits: one prompt a second that saturates the link alone. Each fall that a rise
  follows soon doubles the time until the next fall, up to four windows. So such a load is disturbed seldom.
- The optimum wanders with the lengths it is made from: it counts as changed only by more than a tenth.

Without measurements the threshold holds, and goes back to the policy's own `tokens` after `stale_after_seconds`.
"""

import math
from operator import sub
from typing import Literal

import msgspec
from msgspec.structs import replace

from prfaas.names import HUB
from prfaas.routing.feedforward import MIN_PROMPTS, PoolFacts, optimum, sustainable_in_hub
from prfaas.routing.lengths import Demand, DemandAbove
from prfaas.routing.links import SATURATED_DRAIN_SECONDS, SATURATED_QUEUE_PER_INSTANCE, LinkFacts, LinkView, view_link
from prfaas.routing.prices import prices_of
from prfaas.wire.control import Bandwidth, LinkReport, Price, ThresholdUpdate
from prfaas.wire.routes import LinkWatermarks, RoutingTable, Threshold

RISE_FACTOR = 1.5
FALL_FACTOR = 0.7
MIN_RISE_FROM_TOKENS = 64.0  # from where a threshold of 0, which no factor moves, starts to rise
MAX_PATIENCE_WINDOWS = 4
BASE_DEAD_BAND = 0.1
USUAL_WAIT_SECONDS = 1.0  # what waits longer than a cache on its way is a backlog
UNKNOWN_PREFILL_SECONDS = SATURATED_DRAIN_SECONDS / SATURATED_QUEUE_PER_INSTANCE  # of a pool that was never measured
RELIEF_FALL, RELIEF_RISE, MIN_RELIEF = 0.8, 1.05, 0.25

MetricsState = Literal["Fresh", "Held", "Stale"]


class Offered(msgspec.Struct, frozen=True, kw_only=True):
    """The demand, and the pools that can serve it."""

    demand: Demand
    arrivals_per_second: float | None
    """All requests that were decided; None: not known."""
    pools: tuple[PoolFacts, ...]
    local_waiting_prefills: float = 0.0
    """Prefills that wait in the hub's pools."""


class ControllerFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Everything one step depends on. `now_seconds` is this process's monotonic clock."""

    now_seconds: float
    links: tuple[LinkFacts, ...]
    hub_measured: bool
    """Fresh samples of the hub came in: a link without any is then dead, not merely unseen."""
    recent_offloads: int | None
    """Prompts offloaded within the last `window_seconds`; None: not known."""
    offered: Offered | None = None
    """None: no lengths or no profile are known."""
    recent_prompts: int | None = None
    """Prompts whose lengths are known lately; None: nobody counts them."""


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """The policy's part."""

    threshold: Threshold
    watermarks: LinkWatermarks
    stale_after_seconds: int

    @property
    def window_seconds(self) -> int:
        """The window of rates; follows `stale_after_seconds`, which a site that scrapes seldom has to raise anyway."""
        return max(5, self.stale_after_seconds // 2)

    @property
    def target_share(self) -> float:
        """Share of its effective capacity that a link is planned to carry."""
        # The middle between the two, of percents.
        return (self.watermarks.high_percent + self.watermarks.low_percent) / 200.0


class State(msgspec.Struct, frozen=True, kw_only=True):
    """The memory from one step to the next. `tokens` keeps its fraction, so that small thresholds move too."""

    tokens: float
    bandwidth: Bandwidth = "Scarce"
    base_tokens: float | None = None
    """The optimum as last counted; None: not known."""
    relief: float = 1.0
    """The factor on the optimum, MIN_RELIEF to 1."""
    risen_at_seconds: float = -math.inf
    fell_at_seconds: float = -math.inf
    jumped: bool = False
    """The last move took over a new optimum."""
    jumped_at_seconds: float = -math.inf
    patience_seconds: float = 0.0
    """Time for which a fall waits after a rise, where longer than the window."""
    links: tuple[LinkView, ...] = ()


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one step. `offload_clusters` are the clusters with a live link, sorted."""

    state: State
    tokens: int
    bandwidth: Bandwidth
    offload_clusters: tuple[str, ...]
    links: tuple[LinkReport, ...]
    prices: tuple[Price, ...] = ()
    """The price of each cluster; empty: not in mode Priced, or not known."""
    metrics: MetricsState
    """Fresh: every live link brought a new sample. Held: one did not. Stale: one did not for `stale_after_seconds`."""
    reason: str

    def update(self, expires_seconds: int) -> ThresholdUpdate:
        """Return the update that the gateway routes by for so many seconds."""
        return ThresholdUpdate(
            tokens=self.tokens,
            bandwidth=self.bandwidth,
            offload_clusters=self.offload_clusters,
            expires_seconds=expires_seconds,
            reason=self.reason,
            prices=self.prices,
            links=self.links,
        )


def config_of(table: RoutingTable) -> Config:
    """Return the part of a table that the threshold follows."""
    return Config(threshold=table.threshold, watermarks=table.watermarks, stale_after_seconds=table.stale_after_seconds)


def initial_state(config: Config) -> State:
    """Return the state before the first step: the policy's own threshold, and nothing known of any link."""
    return State(tokens=float(config.threshold.tokens))


def step(config: Config, state: State, facts: ControllerFacts) -> Step:
    """Update the view of every link, then move the threshold."""
    now, before = facts.now_seconds, {view.cluster: view for view in state.links}
    links = tuple(
        view_link(link, before.get(link.cluster), now, config.stale_after_seconds, hub_measured=facts.hub_measured)
        for link in facts.links
    )
    alive = [link for link in links if link.state == "Alive"]
    metrics = _metrics_state(config, facts, alive)
    moved, reason = _decide(config, state, facts, alive, metrics)
    threshold = config.threshold
    offload = () if threshold.mode == "Disabled" else tuple(sorted(link.cluster for link in alive))
    after = _bound(config, state, now, replace(moved, links=links))
    moving = threshold.mode in {"Auto", "Priced"}
    known = facts.offered.pools if facts.offered is not None and metrics != "Stale" else ()
    return Step(
        state=after,
        tokens=round(after.tokens) if moving else threshold.tokens,
        bandwidth=moved.bandwidth,
        offload_clusters=offload,
        links=tuple(link.report for link in links),
        metrics=metrics,
        reason=reason if moving else f"threshold mode is {threshold.mode}",
        prices=prices_of(known, alive) if threshold.mode == "Priced" else (),
    )


def _bound(config: Config, state: State, now: float, moved: State) -> State:
    """Return the moved state within the policy's bounds, with the times and the patience that follow from the move."""
    window_seconds = config.window_seconds
    bounded = min(max(moved.tokens, float(config.threshold.min_tokens)), float(config.threshold.max_tokens))
    rose, fell = bounded > state.tokens, bounded < state.tokens
    patience_seconds = max(state.patience_seconds, float(window_seconds))
    if rose and not moved.jumped and now - state.fell_at_seconds <= window_seconds:  # that fall was a mistake
        patience_seconds = min(2.0 * patience_seconds, float(MAX_PATIENCE_WINDOWS * window_seconds))
    elif now - state.risen_at_seconds > 2.0 * patience_seconds:
        patience_seconds = float(window_seconds)
    return replace(
        moved,
        tokens=bounded,
        risen_at_seconds=now if rose else state.risen_at_seconds,
        fell_at_seconds=now if fell else state.fell_at_seconds,
        jumped_at_seconds=now if moved.jumped else state.jumped_at_seconds,
        patience_seconds=patience_seconds,
    )


def _decide(
    config: Config, state: State, facts: ControllerFacts, alive: list[LinkView], metrics: MetricsState
) -> tuple[State, str]:
    """Return the state with the next threshold before its bounds, and the reason."""
    if metrics == "Stale":
        tokens = config.threshold.tokens
        reason = f"no new measurement for {config.stale_after_seconds} s: back to {tokens} tokens"
        stale = replace(state, tokens=float(tokens), bandwidth="Scarce", base_tokens=None, relief=1.0, jumped=False)
        return stale, reason
    measured = [link for link in alive if link.link_percent is not None]
    if not measured:
        reason = "no new measurement: held" if alive else "no link is alive: nothing is offloaded"
        return replace(state, jumped=False), reason
    busiest = max(measured, key=lambda link: link.pressure_percent)
    pressure_percent = busiest.pressure_percent
    local_seconds = _local_wait_seconds(facts.offered, state.tokens)
    local_percent = 100.0 * local_seconds / SATURATED_DRAIN_SECONDS
    base = _base(config, state, facts.offered, alive, local_seconds)
    relief = _relief(config, state, pressure_percent, local_percent) if base is not None else 1.0
    floor = base * relief if base is not None else _unknown_floor(config, state, facts)
    moved, word = _fed_back(config, state, facts, pressure_percent, local_percent)
    if moved < floor:
        moved, word = floor, _word_of_floor(config, state, floor, is_known=base is not None)
    reason = (
        f"link {busiest.cluster} under {pressure_percent:.0f}% pressure, "
        f"{busiest.utilisation_percent or 0.0:.0f}% of {busiest.effective_mbps:.1f} Mbit/s used: {word}"
    )
    after = replace(
        state,
        tokens=moved,
        bandwidth=_bandwidth(config, state.bandwidth, max(link.link_percent or 0.0 for link in measured)),
        base_tokens=base,
        relief=relief,
        jumped=moved == floor > state.tokens and base != state.base_tokens,
    )
    return after, reason


def _word_of_floor(config: Config, state: State, floor: float, *, is_known: bool) -> str:
    if is_known:
        return "at the optimum of the lengths" if state.tokens <= floor else "lowered to the optimum"
    held = "held" if state.tokens <= floor else f"lowered to the policy's {config.threshold.tokens} tokens"
    return f"{held}, fewer than {MIN_PROMPTS} prompts are known"


def _unknown_floor(config: Config, state: State, facts: ControllerFacts) -> float:
    """Return how far the threshold may fall without an optimum."""
    few = facts.recent_prompts is not None and facts.recent_prompts < MIN_PROMPTS
    return min(state.tokens, float(config.threshold.tokens)) if few else 0.0


def _base(
    config: Config, state: State, offered: Offered | None, alive: list[LinkView], local_seconds: float
) -> float | None:
    """Return the optimum on what is offered, the one before where it hardly changed; None: not known."""
    if offered is None:
        return None
    bounds = _bounds(config)

    def best(carried_mbps: dict[str, float]) -> float | None:
        return optimum(offered.demand, offered.pools, carried_mbps, offered.arrivals_per_second, bounds)

    planned = {link.cluster: link.effective_mbps * config.target_share for link in alive}
    draining = {link.cluster: _draining_mbps(config, link, local_seconds) for link in alive}
    base = best(draining)
    if base is not None and local_seconds > 0.0 and draining != planned:
        # What is kept off a link goes to the hub, and does not wait less there once that is full.
        base = min(base, max(best(planned) or 0.0, _sustainable_in_hub(config, offered)))
    before = state.base_tokens
    if base is None or before is None:
        return base
    kept = bounds[0] <= before <= bounds[1] and abs(base - before) <= BASE_DEAD_BAND * before
    return before if kept else base


def _bounds(config: Config) -> tuple[float, float]:
    return float(config.threshold.min_tokens), float(config.threshold.max_tokens)


def _sustainable_in_hub(config: Config, offered: Offered) -> float:
    return sustainable_in_hub(offered.demand, offered.pools, offered.arrivals_per_second, _bounds(config))


def _draining_mbps(config: Config, link: LinkView, local_seconds: float) -> float:
    """Return what a link may carry: its share of the capacity, less what drains a backlog as fast as it came to be.

    A backlog is what waits for longer than in the hub.
    """
    effective_mbps = link.effective_mbps
    waiting_seconds = link.unsent_bytes * 8 / 1e6 / effective_mbps
    backlog_share = max(0.0, waiting_seconds - max(USUAL_WAIT_SECONDS, local_seconds)) / USUAL_WAIT_SECONDS
    return effective_mbps * max(0.001, config.target_share - backlog_share)


def _relief(config: Config, state: State, pressure_percent: float, local_percent: float) -> float:
    """Return how far below the optimum the threshold may go, from what waits in the hub."""
    if local_percent > max(pressure_percent, float(config.watermarks.high_percent)):
        return max(MIN_RELIEF, state.relief * RELIEF_FALL)
    return min(1.0, state.relief * RELIEF_RISE) if local_percent < config.watermarks.low_percent else state.relief


def _local_wait_seconds(offered: Offered | None, threshold_tokens: float) -> float:
    """Return how long prefills wait in the hub's pools; 0 where there are none or nothing sensible was measured."""
    if offered is None:
        return 0.0
    pools = [pool for pool in offered.pools if pool.cluster == HUB and pool.ready_instances > 0]
    instances = sum(pool.ready_instances for pool in pools)
    waiting = offered.local_waiting_prefills
    if instances < 1 or not math.isfinite(waiting):
        return 0.0
    # What is not offloaded.
    below = DemandAbove(*map(sub, offered.demand.above(0.0), offered.demand.above(threshold_tokens)))
    seconds = sum(pool.ready_instances * _mean_seconds(pool, below) for pool in pools) / instances
    return waiting * seconds / instances


def _mean_seconds(pool: PoolFacts, part: DemandAbove) -> float:
    """Return what a prompt of this part of the demand takes at a pool."""
    known = pool.profile.samples > 0 and part.share > 0
    return part.seconds(pool.profile) / part.share if known else UNKNOWN_PREFILL_SECONDS


def _fed_back(
    config: Config, state: State, facts: ControllerFacts, pressure_percent: float, local_percent: float
) -> tuple[float, str]:
    """Return the threshold after one move under these pressures, and the word for it.

    It never falls with the link's pressure, and never rises with the hub's.
    """
    high = float(config.watermarks.high_percent)
    worst = max(high, pressure_percent)
    if pressure_percent > high and local_percent <= worst:
        return _raised(config, state, facts, pressure_percent, local_percent)
    low = float(config.watermarks.low_percent)
    for_link = max(0.0, (low - pressure_percent) / low)
    for_hub = min(1.0, max(0.0, (local_percent - worst) / 100.0))
    patience_seconds = max(state.patience_seconds, config.window_seconds)
    if for_link > for_hub and facts.now_seconds - state.risen_at_seconds < patience_seconds:
        return _lowered(state, for_hub), "held, it rose a moment ago"
    word = "lowered, more waits in the hub" if for_hub > for_link else "lowered"
    share = max(for_link, for_hub)
    return _lowered(state, share), word if share else "held between the watermarks"


def _raised(
    config: Config, state: State, facts: ControllerFacts, pressure_percent: float, local_percent: float
) -> tuple[float, str]:
    """Return the threshold under a pressure above the high watermark."""
    high = float(config.watermarks.high_percent)
    if local_percent > max(high, pressure_percent / 2.0):
        return state.tokens, "held, the hub is busy too"
    if facts.recent_offloads == 0:
        return state.tokens, "held, nothing was offloaded lately"
    if facts.now_seconds - state.jumped_at_seconds < config.window_seconds:
        return state.tokens, "held, the optimum rose a moment ago"
    share = min(1.0, (pressure_percent - high) / max(1.0, 100.0 - high))
    raised = max(state.tokens, MIN_RISE_FROM_TOKENS) * (1.0 + (RISE_FACTOR - 1.0) * share)
    if facts.offered is not None and local_percent > 0.0 and state.base_tokens is not None:
        sustainable = max(state.tokens, state.base_tokens, _sustainable_in_hub(config, facts.offered))
        if raised > sustainable:
            return sustainable, "raised no further than the hub bears"
    return raised, "raised"


def _lowered(state: State, share: float) -> float:
    return state.tokens * (1.0 - (1.0 - FALL_FACTOR) * share)


def _bandwidth(config: Config, before: Bandwidth, link_percent: float) -> Bandwidth:
    if link_percent > config.watermarks.high_percent:
        return "Scarce"
    return "Abundant" if link_percent < config.watermarks.low_percent else before


def _metrics_state(config: Config, facts: ControllerFacts, alive: list[LinkView]) -> MetricsState:
    """Return how fresh the measurements of the live links are; of the hub where no link is alive."""
    if not alive:
        return "Fresh" if facts.hub_measured else "Held"
    age_seconds = max(facts.now_seconds - link.measured_at_seconds for link in alive)
    if age_seconds > config.stale_after_seconds:
        return "Stale"
    return "Fresh" if all(link.link_percent is not None for link in alive) else "Held"
