"""The threshold controller: moves the length above which prompts leave the hub, by what the links carry now.

One pure step an interval (section 3.4.3 of the paper) updates the view of every link (prfaas.routing.links), and then
makes the threshold in one of two ways:

    balance    where lengths and profiles are known: both sides are equally busy with what comes and what waits, over
               links that carry what they are seen to carry (prfaas.routing.balance). It is where it should be at once
    feedback   where they are not: above the high watermark the threshold rises, by up to x1.5 an interval at 100 %
               pressure; below the low one it falls, by down to x0.7 at 0 %; between the two it holds. So it finds the
               link's limit

While fewer than ENOUGH_PROMPTS are known, neither goes below the policy's own `tokens`: the lengths are not sure, and
an idle link says nothing of what the offload pools can do.

In feedback the hub has a pressure, too, of the time that prefills wait there. Equal waits are equal pressures: a
request does not care where it waits. Where the hub's is the worse, the threshold falls whatever the link says. While it
is more than half of the link's, nothing rises. What is taken from a waiting link would wait in the hub.

Without these feedback would swing:

- Rates are means over a window, so the link's answer to a move comes late. A fall waits until the window has left the
  last rise behind. A rise needs a prompt that was offloaded within the window. Once none is, a higher threshold changes
  nothing but the time it takes to come back. Nothing moves twice on one sample.
- Some loads have no threshold that fits: one prompt a second that saturates the link alone. Each fall that a rise
  follows soon doubles the time until the next fall, up to four windows. So such a load is disturbed seldom.

Without measurements the threshold holds, and goes back to the policy's own `tokens` after `stale_after_seconds`.
"""

import math
from typing import Literal

import msgspec
from msgspec.structs import replace

from prfaas.routing.balance import Offered, find_base, find_bearable, find_trim, keep_steady, mean_waiting, waiting_now
from prfaas.routing.feedforward import ENOUGH_PROMPTS, NO_QUEUES, Waiting
from prfaas.routing.links import SATURATED_DRAIN_SECONDS, LinkFacts, LinkView, view_link
from prfaas.routing.prices import prices_of
from prfaas.wire.control import Bandwidth, LinkReport, Price, ThresholdUpdate
from prfaas.wire.routes import LinkWatermarks, RoutingTable, Threshold

RISE_FACTOR = 1.5
FALL_FACTOR = 0.7
MIN_RISE_FROM_TOKENS = 64.0  # from where a threshold of 0, which no factor moves, starts to rise
MAX_PATIENCE_WINDOWS = 4

MetricsState = Literal["Fresh", "Held", "Stale"]


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


class State(msgspec.Struct, frozen=True, kw_only=True):
    """The memory from one step to the next. `tokens` keeps its fraction, so that small thresholds move too."""

    tokens: float
    bandwidth: Bandwidth = "Scarce"
    base_tokens: float | None = None
    """The threshold of the balance as last counted; None: not known, and feedback moved the threshold."""
    waiting: Waiting = NO_QUEUES
    """What waits on either side, as a running mean."""
    weighed_at_seconds: float = -math.inf
    """When that mean was made."""
    risen_at_seconds: float = -math.inf
    """When feedback last raised the threshold."""
    fell_at_seconds: float = -math.inf
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
    """Return the moved state within the policy's bounds, with what feedback remembers of its own moves."""
    bounded = min(max(moved.tokens, float(config.threshold.min_tokens)), float(config.threshold.max_tokens))
    if moved.base_tokens is not None:
        return replace(moved, tokens=bounded)
    window_seconds = config.window_seconds
    rose, fell = bounded > state.tokens, bounded < state.tokens
    patience_seconds = max(state.patience_seconds, float(window_seconds))
    if rose and now - state.fell_at_seconds <= window_seconds:  # that fall was a mistake
        patience_seconds = min(2.0 * patience_seconds, float(MAX_PATIENCE_WINDOWS * window_seconds))
    elif now - state.risen_at_seconds > 2.0 * patience_seconds:
        patience_seconds = float(window_seconds)
    return replace(
        moved,
        tokens=bounded,
        risen_at_seconds=now if rose else state.risen_at_seconds,
        fell_at_seconds=now if fell else state.fell_at_seconds,
        patience_seconds=patience_seconds,
    )


def _decide(
    config: Config, state: State, facts: ControllerFacts, alive: list[LinkView], metrics: MetricsState
) -> tuple[State, str]:
    """Return the state with the next threshold before its bounds, and the reason."""
    if metrics == "Stale":
        tokens = config.threshold.tokens
        reason = f"no new measurement for {config.stale_after_seconds} s: back to {tokens} tokens"
        stale = replace(state, tokens=float(tokens), bandwidth="Scarce", base_tokens=None, waiting=NO_QUEUES)
        return replace(stale, weighed_at_seconds=-math.inf), reason
    measured = [link for link in alive if link.link_percent is not None]
    if not measured:
        return state, "no new measurement: held" if alive else "no link is alive: nothing is offloaded"
    threshold, marks, offered = config.threshold, config.watermarks, facts.offered
    waits = waiting_now(offered, alive, state.tokens) if offered else NO_QUEUES
    since_seconds = facts.now_seconds - state.weighed_at_seconds  # infinite in the first step
    interval_seconds = min(float(config.stale_after_seconds), since_seconds)
    waiting = mean_waiting(state.waiting, waits, interval_seconds)
    base = find_base(threshold, marks, offered, alive, waiting, interval_seconds) if offered else None
    busiest = max(measured, key=lambda link: link.pressure_percent)
    if offered is None or base is None:
        local_percent = 100.0 * waits.hub_seconds / SATURATED_DRAIN_SECONDS
        tokens, word = _fed_back(config, state, facts, busiest.pressure_percent, local_percent)
    else:
        base = keep_steady(threshold, base, state.base_tokens)
        before = state.tokens / state.base_tokens if state.base_tokens else 1.0
        used_percent = max(link.utilisation_percent or 0.0 for link in alive)
        trim = find_trim(before, marks, used_percent, waiting, offloads_lately=facts.recent_offloads != 0)
        tokens = min(base * trim, max(base, find_bearable(threshold, offered, waiting)))
        where = "trimmed above" if tokens > base else "at"
        if offered.demand.prompts < ENOUGH_PROMPTS:
            where = f"no lower than the policy's {threshold.tokens} tokens with few prompts, {where}"
        word = f"{where} the balance; {waiting.hub_seconds:.1f} s wait in the hub and {waiting.away_seconds:.1f} s away"
    reason = (
        f"link {busiest.cluster} under {busiest.pressure_percent:.0f}% pressure, "
        f"{busiest.utilisation_percent or 0.0:.0f}% of {busiest.effective_mbps:.1f} Mbit/s used: {word}"
    )
    after = replace(
        state,
        tokens=tokens,
        bandwidth=_bandwidth(config, state.bandwidth, max(link.link_percent or 0.0 for link in measured)),
        base_tokens=base,
        waiting=waiting,
        weighed_at_seconds=facts.now_seconds,
    )
    return after, reason


def _fed_back(
    config: Config, state: State, facts: ControllerFacts, pressure_percent: float, local_percent: float
) -> tuple[float, str]:
    """Return the threshold after one move under these pressures, and the word for it."""
    moved, word = _moved(config, state, facts, pressure_percent, local_percent)
    few = facts.recent_prompts is not None and facts.recent_prompts < ENOUGH_PROMPTS
    floor = min(state.tokens, float(config.threshold.tokens)) if few else 0.0
    if moved >= floor:
        return moved, word
    held = "held" if state.tokens <= floor else f"lowered to the policy's {config.threshold.tokens} tokens"
    return floor, f"{held}, fewer than {ENOUGH_PROMPTS} prompts are known"


def _moved(
    config: Config, state: State, facts: ControllerFacts, pressure_percent: float, local_percent: float
) -> tuple[float, str]:
    """Return the threshold after one move, however few prompts are known.

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
    share = min(1.0, (pressure_percent - high) / max(1.0, 100.0 - high))
    return max(state.tokens, MIN_RISE_FROM_TOKENS) * (1.0 + (RISE_FACTOR - 1.0) * share), "raised"


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
