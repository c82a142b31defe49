"""The long timescale: finds the one change of the pools to make now, and decides when to make none.

There are two kinds of change. A *conversion* moves instances that two pools share from one role to the other, towards
the split that carries most, equation (8). *Scaling* adds instances to the stage that is too busy, or removes one.
The hard part is to rest:

- Every figure is measured, so a gain below a tenth is noise. After a change a cooldown follows. In it the short loop
  finds its new threshold, and the measurements leave the old state behind.
- A conversion never crosses the best split, and never breaks a promised time to the first token. So facts that stay the
  same lead to a state in which nothing is wanted.
- Old, missing and thin facts, and pools that have not become what was last asked of them, mean: hold.

*Conversions.* More instances that prefill raise the prefill rate and lower the decode rate. So the best split lies on
either side of where the two cross, and is found by halving. Each step towards it serves more. A promised time to the
first token adds two rules. No step may break it, or make it worse where it is broken. Where waits break it, a step that
shortens them by a tenth is worth its cost in capacity, if no stage gets too busy.

*Scaling.* A stage that is too busy gets as many instances as it lacks. At most it doubles the pool, because
measurements may be wrong. Of several prefill pools the one grows whose next instance helps most; a full link excludes
an offload pool. Instances are removed one at a time, and only where the rest stays below three quarters of the target.
So the next step does not add them again. Only pools with an upper bound whose replicas we may write take part. A pool
goes to zero only where its lower bound says so, and returns when requests wait. The decode pool never goes to zero: a
gateway without it refuses requests, and their arrival would not be seen.

No clock and no I/O: facts in, at most one change out, with its reason. Bounds and owners of a pool are facts.
"""

import math
from bisect import bisect_left
from collections.abc import Iterable
from typing import Final, Literal

import msgspec

from prfaas.capacity.installation import Forecast, Installation, Pool, forecast, ttft_p90_seconds
from prfaas.wire.routes import PoolRole

MIN_GAIN: Final = 0.1
"""A gain that is worth a change: profiles, lengths and steps are hardly known better than that."""
MAX_SHARE_AT_ONCE: Final = 0.1
"""Of shared instances, so many convert together, at least one."""
ROOM_SHARE: Final = 0.75
"""Share of the target below which the rest must stay for an instance to go."""


class Rules(msgspec.Struct, frozen=True, kw_only=True):
    """The policy's part."""

    converts: bool
    min_prefill: int
    min_decode: int
    conversion_cooldown_seconds: float
    scales: bool
    target_load: float
    scaling_cooldown_seconds: float
    ttft_seconds: float | None = None
    """Promised P90 of the time to the first token."""


class InstallationState(msgspec.Struct, frozen=True, kw_only=True):
    """The state of the installation now."""

    arrivals_per_second: float | None = None
    """None: not known."""
    waiting_prefills: int = 0
    since_change_seconds: float = math.inf
    stale: str = ""
    """A sentence that says why measurements are too old; empty: they are not."""
    unknown: str = ""
    """A sentence that names the facts that are missing for a plan; empty: none."""
    under_way: str = ""
    """A sentence that names a change or failure of the pools that has not ended; empty: none."""
    ours: bool = False
    """True when our own last change is under way."""


class LongLoopDecision(msgspec.Struct, frozen=True, kw_only=True):
    """The changes to make, the condition Balanced, and the figures behind both."""

    status: Literal["True", "False", "Unknown"]
    reason: str
    message: str
    changes: dict[str, int] = {}
    """New replicas by pool; empty: none."""
    now: Forecast | None = None
    """None: not known."""
    best: Forecast | None = None
    """With as many instances as there are, divided anew."""


class Proposal(msgspec.Struct, frozen=True, kw_only=True):
    """A change that is worth making: new replicas by pool."""

    kind: Literal["Converting", "Scaling"]
    changes: dict[str, int]
    why: str


def decide(rules: Rules, installation: Installation, moment: InstallationState) -> LongLoopDecision:
    """Return the one change to make now, or why none is made."""
    if moment.stale:
        return LongLoopDecision(status="Unknown", reason="MetricsStale", message=f"{moment.stale}: nothing is changed")
    if (moment.arrivals_per_second or moment.waiting_prefills) and (woken := find_first_instance(rules, installation)):
        return _made(woken)  # without a cooldown: they wait
    now = best = None
    if not moment.unknown:
        now = forecast(installation, installation.counts)
        best = find_best_split(rules, installation, now)
    if moment.under_way:
        reason = "Converting" if moment.ours else "PoolsNotSettled"
        figures = f" ({describe(now)})" if now else ""
        message = f"{moment.under_way}: nothing else is changed before that{figures}"
        return LongLoopDecision(status="False", reason=reason, message=message, now=now, best=best)
    if moment.arrivals_per_second == 0:
        wanted = shrink_when_idle(rules, installation)
    elif now is None or best is None:
        return LongLoopDecision(status="Unknown", reason="NotMeasured", message=f"{moment.unknown}: nothing is changed")
    else:
        wanted = find_conversion(rules, installation, now, best) or find_scaling(rules, installation, now)
    if wanted is not None:
        return _if_allowed(rules, installation, moment, wanted, _made(wanted, now, best))
    return _rest(rules, installation, now, best)


def _made(made: Proposal, now: Forecast | None = None, best: Forecast | None = None) -> LongLoopDecision:
    return LongLoopDecision(
        status="False", reason=made.kind, message=made.why, changes=made.changes, now=now, best=best
    )


def _if_allowed(
    rules: Rules, installation: Installation, moment: InstallationState, wanted: Proposal, decision: LongLoopDecision
) -> LongLoopDecision:
    """Return the decision, without its change where a pool is not ours to write or the cooldown is not over."""
    refusals = [pool.refusal for pool in installation.pools if pool.name in wanted.changes and pool.refusal]
    if refusals:
        message = f"not done: {wanted.why}; {refusals[0]}"
        return msgspec.structs.replace(decision, reason="ReplicasNotOwned", message=message, changes={})
    converting = wanted.kind == "Converting"
    cooldown_seconds = rules.conversion_cooldown_seconds if converting else rules.scaling_cooldown_seconds
    if moment.since_change_seconds < cooldown_seconds:
        message = f"{cooldown_seconds:.0f} s after the last change: {wanted.why}"
        return msgspec.structs.replace(decision, reason="Cooldown", message=message, changes={})
    return decision


def _rest(rules: Rules, installation: Installation, now: Forecast | None, best: Forecast | None) -> LongLoopDecision:
    """Return the decision to change nothing, and say if the promises are kept."""
    if now is None or best is None:
        return LongLoopDecision(status="True", reason="Balanced", message="no request comes", now=now, best=best)
    seen = describe(now)
    if broken := _broken_promise(rules, installation, now):
        reason, why = broken
        return LongLoopDecision(status="False", reason=reason, message=f"{seen}; {why}", now=now, best=best)
    more = gain(best, now)
    other = f"; N_p {installation.hub_prefill(best.counts)} would serve {percent(more)} more" if more > 0 else ""
    return LongLoopDecision(status="True", reason="Balanced", message=f"{seen}{other}", now=now, best=best)


def _broken_promise(rules: Rules, installation: Installation, now: Forecast) -> tuple[str, str] | None:
    """Return the reason and a sentence when a promise is broken and no allowed change would help."""
    kept = "; ".join(f"{pool.name}: {_kept_by(pool)}" for pool in installation.pools)
    if rules.scales and now.busiest > rules.target_load:
        return "AtBounds", f"that is above {rules.target_load:.0%}, and no pool may grow that would help ({kept})"
    if now.busiest >= 1:
        return "Overloaded", "no conversion helps: add instances, or set scaling.mode to Auto"
    if rules.ttft_seconds is not None:
        expected = ttft_p90_seconds(installation, now)
        if expected > rules.ttft_seconds:
            return (
                "SloNotKept",
                f"P90 of the first token is {expected:.3g} s where {rules.ttft_seconds:.3g} s are promised",
            )
    return None


def _kept_by(pool: Pool) -> str:
    if pool.refusal:
        return pool.refusal
    return "has no maxReplicas" if pool.most is None else f"{pool.replicas} of at most {pool.most}"


def find_best_split(rules: Rules, installation: Installation, now: Forecast) -> Forecast:
    """Return the split that carries most within bounds, with as many instances as there are."""
    allowed = _allowed(rules, installation)
    if not allowed:
        return now

    def prefill_carries_more(prefilling: int) -> bool:
        seen = _forecast_split(installation, prefilling)
        return seen.prefill_per_second >= seen.decode_per_second

    crossing = allowed[bisect_left(allowed[:-1], True, key=prefill_carries_more)]
    sides = [_forecast_split(installation, n) for n in (crossing, crossing - 1) if n in allowed]
    return max(sides, key=lambda seen: seen.lambda_max)


def find_conversion(rules: Rules, installation: Installation, now: Forecast, best: Forecast) -> Proposal | None:
    """Return the conversion to make: back within bounds, towards the best split, or towards a shorter wait."""
    sharer, allowed = installation.sharer, _allowed(rules, installation)
    if sharer is None or not allowed:
        return None
    if sharer.replicas not in allowed:
        nearest = allowed[0] if sharer.replicas < allowed[0] else allowed[-1]
        return _convert(installation, now, nearest, "the bounds ask for it")
    towards_best = _step_towards(rules, installation, now, best)
    return towards_best or _convert_for_ttft(rules, installation, now, sharer)


def _step_towards(rules: Rules, installation: Installation, now: Forecast, best: Forecast) -> Proposal | None:
    """Return a step towards the best split, if it is worth it and keeps what is promised."""
    sharer, more = installation.sharer, gain(best, now)
    if sharer is None or more < MIN_GAIN:
        return None
    most = max(1, int(MAX_SHARE_AT_ONCE * (sharer.replicas + installation.decode.replicas)))
    wanted = sharer.replicas + max(-most, min(most, best.counts[sharer.name] - sharer.replicas))
    seen = _forecast_split(installation, wanted)
    if seen.lambda_max <= now.lambda_max:
        return None
    promised = rules.ttft_seconds
    if promised is not None:
        expected = ttft_p90_seconds(installation, seen)
        if expected > promised and expected > ttft_p90_seconds(installation, now):
            return None
    carried = f"{more:.0%} more would be served" if math.isfinite(more) else "now nothing is served, and some would"
    return _convert(installation, now, wanted, f"{carried} with N_p {installation.hub_prefill(best.counts)}")


def _convert_for_ttft(rules: Rules, installation: Installation, now: Forecast, sharer: Pool) -> Proposal | None:
    """Return a conversion of one instance that shortens a wait that is too long."""
    promised, allowed = rules.ttft_seconds, _allowed(rules, installation)
    if promised is None or (expected := ttft_p90_seconds(installation, now)) <= promised:
        return None
    neighbours = [n for n in (sharer.replicas - 1, sharer.replicas + 1) if n in allowed]
    times = {n: ttft_p90_seconds(installation, _forecast_split(installation, n)) for n in neighbours}
    least = min(times, key=lambda n: times[n], default=None)
    if least is None or not math.isfinite(times[least]) or times[least] > (1 - MIN_GAIN) * expected:
        return None
    why = f"P90 of the first token is {expected:.3g} s where {promised:.3g} s are promised, and would be "
    return _convert(installation, now, least, f"{why}{times[least]:.3g} s")


def _convert(installation: Installation, now: Forecast, prefilling: int, why: str) -> Proposal:
    return propose("Converting", installation, now, _divide(installation, prefilling), why)


def _allowed(rules: Rules, installation: Installation) -> range:
    """Return how many of the shared instances may prefill, from fewest to most; empty where bounds leave nothing."""
    decode, sharer = installation.decode, installation.sharer
    if sharer is None or not rules.converts:
        return range(0)
    total = decode.replicas + sharer.replicas
    fewest = max(rules.min_prefill, sharer.least or 0, total - decode.most if decode.most is not None else 0)
    most = total - max(rules.min_decode, decode.least or 0)
    return range(fewest, (most if sharer.most is None else min(most, sharer.most)) + 1)


def _divide(installation: Installation, prefilling: int) -> dict[str, int]:
    """Return the replicas of both pools when so many of the shared instances prefill."""
    decode, sharer = installation.decode, installation.sharer
    if sharer is None:
        return {}
    return {sharer.name: prefilling, decode.name: decode.replicas + sharer.replicas - prefilling}


def _forecast_split(installation: Installation, prefilling: int) -> Forecast:
    return forecast(installation, {**installation.counts, **_divide(installation, prefilling)})


def find_scaling(rules: Rules, installation: Installation, now: Forecast) -> Proposal | None:
    if not rules.scales:
        return None
    return (
        _grow_decode(rules, installation, now)
        or _grow_prefill(rules, installation, now)
        or _scale_for_ttft(rules, installation, now)
        or _shrink(rules, installation, now)
    )


def _grow_decode(rules: Rules, installation: Installation, now: Forecast) -> Proposal | None:
    pool = next(iter(_growing(installation, "decode")), None)
    if pool is None or now.decode_load <= rules.target_load:
        return None
    return _grow(rules, installation, pool, now)


def _grow_prefill(rules: Rules, installation: Installation, now: Forecast) -> Proposal | None:
    if now.prefill_load <= rules.target_load:
        return None
    pools = _growing(installation, "prefill")
    tried = {pool.name: _forecast_size(installation, pool, pool.replicas + 1).prefill_per_second for pool in pools}
    useful = [pool for pool in pools if tried[pool.name] > now.prefill_per_second]
    if useful:
        return _grow(rules, installation, max(useful, key=lambda pool: tried[pool.name]), now)
    # An instance has to run before it is measured.
    new = next((pool for pool in pools if not pool.replicas and pool.profile is None), None)
    if new is None:
        return None
    why = f"prefill is {percent(now.prefill_load)} busy, and what {new.name} could do is not known"
    return propose("Scaling", installation, now, {new.name: 1}, why)


def _grow(rules: Rules, installation: Installation, pool: Pool, now: Forecast) -> Proposal:
    """Add as many instances as bring the pool's stage below its target, within the pool's bounds."""

    def load(seen: Forecast) -> float:
        return seen.decode_load if pool.role == "decode" else seen.prefill_load

    most, wanted = min(pool.most or 0, max(1, 2 * pool.replicas)), pool.replicas + 1
    while wanted < most and load(_forecast_size(installation, pool, wanted)) > rules.target_load:
        wanted += 1
    why = f"{pool.role} is {percent(load(now))} busy, above {rules.target_load:.0%}"
    return propose("Scaling", installation, now, {pool.name: wanted}, why)


def _scale_for_ttft(rules: Rules, installation: Installation, now: Forecast) -> Proposal | None:
    """Add the instance that shortens a wait that is too long most, by a tenth at least."""
    promised = rules.ttft_seconds
    if promised is None or (expected := ttft_p90_seconds(installation, now)) <= promised:
        return None
    times = {
        pool.name: ttft_p90_seconds(installation, _forecast_size(installation, pool, pool.replicas + 1))
        for role in ("decode", "prefill")
        for pool in _growing(installation, role)
    }
    best = min(times, key=lambda name: times[name], default=None)
    if best is None or not math.isfinite(times[best]) or times[best] > (1 - MIN_GAIN) * expected:
        return None
    why = f"P90 of the first token is {expected:.3g} s where {promised:.3g} s are promised"
    return propose("Scaling", installation, now, {best: installation.counts[best] + 1}, why)


def _shrink(rules: Rules, installation: Installation, now: Forecast) -> Proposal | None:
    """Remove the instance that is missed least, if the rest has room without it."""
    tried = [(pool, _forecast_size(installation, pool, pool.replicas - 1)) for pool in _shrinking(installation.pools)]
    room = [(pool, seen) for pool, seen in tried if _has_room(rules, installation, seen)]
    if not room:
        return None
    pool, seen = max(room, key=lambda one: one[1].lambda_max)
    busy = f"prefill would be {percent(seen.prefill_load)} busy and decode {percent(seen.decode_load)}"
    return propose("Scaling", installation, now, {pool.name: pool.replicas - 1}, f"without it {busy}")


def _has_room(rules: Rules, installation: Installation, seen: Forecast) -> bool:
    if seen.busiest > ROOM_SHARE * rules.target_load:
        return False
    return rules.ttft_seconds is None or ttft_p90_seconds(installation, seen) <= ROOM_SHARE * rules.ttft_seconds


def shrink_when_idle(rules: Rules, installation: Installation) -> Proposal | None:
    largest = max(_shrinking(installation.pools), key=lambda pool: pool.replicas, default=None)
    if largest is None or not rules.scales:
        return None
    why = f"scales {largest.name} {largest.replicas} to {largest.replicas - 1}, since no request comes"
    return Proposal(kind="Scaling", changes={largest.name: largest.replicas - 1}, why=why)


def find_first_instance(rules: Rules, installation: Installation) -> Proposal | None:
    """Add the first instance of a role without any, when requests come; that needs no measurement."""
    if not rules.scales:
        return None
    roles: tuple[PoolRole, ...] = ("decode", "prefill")
    for role in roles:
        if any(pool.replicas for pool in installation.pools if pool.role == role):
            continue
        # The hub first: what an offload pool sends has to cross a link.
        for pool in sorted(_growing(installation, role), key=lambda pool: bool(pool.link)):
            why = f"scales {pool.name} 0 to 1, since requests come and no instance is there to {role}"
            return Proposal(kind="Scaling", changes={pool.name: 1}, why=why)
    return None


def _growing(installation: Installation, role: PoolRole) -> list[Pool]:
    return [
        pool
        for pool in installation.pools
        if pool.role == role and not pool.refusal and pool.most is not None and pool.replicas < pool.most
    ]


def _shrinking(pools: Iterable[Pool]) -> list[Pool]:
    return [pool for pool in pools if not pool.refusal and pool.most is not None and pool.replicas > _least(pool)]


def _least(pool: Pool) -> int:
    """Return the lower bound of a pool; one where it has none."""
    if pool.least is None:
        return 1
    return max(1, pool.least) if pool.role == "decode" else pool.least


def _forecast_size(installation: Installation, pool: Pool, replicas: int) -> Forecast:
    return forecast(installation, {**installation.counts, pool.name: replicas})


def propose(
    kind: Literal["Converting", "Scaling"], installation: Installation, now: Forecast, changes: dict[str, int], why: str
) -> Proposal:
    after = forecast(installation, {**installation.counts, **changes})
    moved = ", ".join(f"{name} {now.counts[name]} to {count}" for name, count in changes.items())
    figures = f"{now.lambda_max:.3g} to {after.lambda_max:.3g} requests/s, {now.arrivals_per_second:.3g} arrive"
    verb = "converts" if kind == "Converting" else "scales"
    return Proposal(kind=kind, changes=changes, why=f"{verb} {moved}, since {why}: {figures}")


def describe(seen: Forecast) -> str:
    loads = f"prefill is {percent(seen.prefill_load)} busy and decode {percent(seen.decode_load)}"
    return f"{seen.arrivals_per_second:.3g} requests/s arrive, {seen.lambda_max:.3g} can be served; {loads}"


def percent(share: float) -> str:
    return f"{share:.0%}" if math.isfinite(share) else "hopelessly"


def gain(best: Forecast, now: Forecast) -> float:
    """Return the share by which the best split serves more; infinite where nothing is served now."""
    if best.lambda_max <= now.lambda_max:
        return 0.0
    return best.lambda_max / now.lambda_max - 1 if now.lambda_max > 0 else math.inf
