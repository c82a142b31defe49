"""Conversions: how many of the instances that two pools share should prefill, and the next step towards that.

With as many instances as there are, more that prefill raise what prefill bears and lower what decode bears. So the best
split lies on either side of where the two cross, found by halving, and each step towards it serves more. A promised
time to the first token changes that in two ways: no step may break it, or make it worse where it is broken; and where
waits break it, a step that shortens them by a tenth is worth what it costs in capacity, if nothing gets too busy.
"""

import math
from typing import Final

from prfaas.capacity.changes import MIN_GAIN, Proposal, Rules, gain, propose
from prfaas.capacity.installation import Installation, Outlook, Pool, outlook, ttft_p90_seconds

MAX_SHARE_AT_ONCE: Final = 0.1
"""Of shared instances, so many convert together, at least one."""


def best_split(rules: Rules, installation: Installation, now: Outlook) -> Outlook:
    """Return the split that carries most within bounds, with as many instances as there are."""
    allowed = _allowed(rules, installation)
    if not allowed:
        return now
    low, high = allowed[0], allowed[-1]
    while low < high:
        middle = (low + high) // 2
        seen = _looked(installation, middle)
        if seen.prefill_per_second >= seen.decode_per_second:
            high = middle
        else:
            low = middle + 1
    sides = [_looked(installation, n) for n in (low, low - 1) if n in allowed]
    return max(sides, key=lambda seen: seen.lambda_max)


def conversion(rules: Rules, installation: Installation, now: Outlook, best: Outlook) -> Proposal | None:
    """Return the conversion to make: back within bounds, towards the best split, or towards a shorter wait."""
    sharer, allowed = installation.sharer, _allowed(rules, installation)
    if sharer is None or not allowed:
        return None
    if sharer.replicas not in allowed:
        nearest = allowed[0] if sharer.replicas < allowed[0] else allowed[-1]
        return _converted(installation, now, nearest, "the bounds ask for it")
    towards_best = _towards(rules, installation, now, best)
    return towards_best or _for_the_wait(rules, installation, now, sharer)


def _allowed(rules: Rules, installation: Installation) -> range:
    """Return how many of the shared instances may prefill, from fewest to most; empty where bounds leave nothing."""
    decode, sharer = installation.decode, installation.sharer
    if sharer is None or not rules.converts:
        return range(0)
    total = decode.replicas + sharer.replicas
    fewest = max(rules.min_prefill, sharer.least or 0, total - decode.most if decode.most is not None else 0)
    most = total - max(rules.min_decode, decode.least or 0)
    return range(fewest, (most if sharer.most is None else min(most, sharer.most)) + 1)


def _divided(installation: Installation, prefilling: int) -> dict[str, int]:
    """Return the replicas of both pools when so many of the shared instances prefill."""
    decode, sharer = installation.decode, installation.sharer
    if sharer is None:
        return {}
    return {sharer.name: prefilling, decode.name: decode.replicas + sharer.replicas - prefilling}


def _looked(installation: Installation, prefilling: int) -> Outlook:
    return outlook(installation, {**installation.counts, **_divided(installation, prefilling)})


def _converted(installation: Installation, now: Outlook, prefilling: int, why: str) -> Proposal:
    return propose("Converting", installation, now, _divided(installation, prefilling), why)


def _towards(rules: Rules, installation: Installation, now: Outlook, best: Outlook) -> Proposal | None:
    """Return a step towards the best split, if it is worth it and keeps what is promised."""
    sharer, more = installation.sharer, gain(best, now)
    if sharer is None or more < MIN_GAIN:
        return None
    most = max(1, int(MAX_SHARE_AT_ONCE * (sharer.replicas + installation.decode.replicas)))
    wanted = sharer.replicas + max(-most, min(most, best.counts[sharer.name] - sharer.replicas))
    seen = _looked(installation, wanted)
    if seen.lambda_max <= now.lambda_max:
        return None
    promised = rules.ttft_seconds
    if promised is not None:
        expected = ttft_p90_seconds(installation, seen)
        if expected > promised and expected > ttft_p90_seconds(installation, now):
            return None
    carried = f"{more:.0%} more would be served" if math.isfinite(more) else "now nothing is served, and some would"
    return _converted(installation, now, wanted, f"{carried} with N_p {installation.hub_prefill(best.counts)}")


def _for_the_wait(rules: Rules, installation: Installation, now: Outlook, sharer: Pool) -> Proposal | None:
    """Return a conversion of one instance that shortens a wait that is too long."""
    promised, allowed = rules.ttft_seconds, _allowed(rules, installation)
    if promised is None or (expected := ttft_p90_seconds(installation, now)) <= promised:
        return None
    neighbours = [n for n in (sharer.replicas - 1, sharer.replicas + 1) if n in allowed]
    times = {n: ttft_p90_seconds(installation, _looked(installation, n)) for n in neighbours}
    least = min(times, key=lambda n: times[n], default=None)
    if least is None or not math.isfinite(times[least]) or times[least] > (1 - MIN_GAIN) * expected:
        return None
    why = f"P90 of the first token is {expected:.3g} s where {promised:.3g} s are promised, and would be "
    return _converted(installation, now, least, f"{why}{times[least]:.3g} s")
