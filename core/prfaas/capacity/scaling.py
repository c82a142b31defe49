"""Changes in number: which pool gets more instances, and which gives one up.

Instances are added to the stage that is too busy, at once as many as it lacks, but at most as many as the pool has:
what is measured may be wrong. Of several prefill pools the one grows whose next instance helps most, which a full link
keeps an offload pool from. They are taken away one at a time, and only where the rest stays below three quarters of the
target, so that the next step is not to add them again. A pool takes part that has an upper bound and is ours to write;
it goes to zero only where its lower bound says so, and comes back when requests wait. The decode pool never goes to
zero: a gateway without it refuses requests, and nobody would know that they come.
"""

import math
from collections.abc import Iterable
from typing import Final

from prfaas.capacity.changes import MIN_GAIN, Proposal, Rules, percent, propose
from prfaas.capacity.installation import Installation, Outlook, Pool, outlook, ttft_p90_seconds
from prfaas.wire.routes import Role

ROOM_SHARE: Final = 0.75
"""Share of the target below which the rest must stay for an instance to go."""


def wake(rules: Rules, installation: Installation) -> Proposal | None:
    """Return the first instance of a role that nobody has, for when requests come: nothing has to be known for that."""
    if not rules.scales:
        return None
    roles: tuple[Role, ...] = ("decode", "prefill")
    for role in roles:
        if any(pool.replicas for pool in installation.pools if pool.role == role):
            continue
        # At home first: what an offload pool sends has to cross a link.
        for pool in sorted(_growing(installation, role), key=lambda pool: bool(pool.link)):
            why = f"scales {pool.name} 0 to 1, since requests come and no instance is there to {role}"
            return Proposal(kind="Scaling", changes={pool.name: 1}, why=why)
    return None


def when_idle(rules: Rules, installation: Installation) -> Proposal | None:
    """Return one instance fewer of the largest pool, for when nothing comes at all."""
    largest = max(_shrinking(installation.pools), key=lambda pool: pool.replicas, default=None)
    if largest is None or not rules.scales:
        return None
    why = f"scales {largest.name} {largest.replicas} to {largest.replicas - 1}, since no request comes"
    return Proposal(kind="Scaling", changes={largest.name: largest.replicas - 1}, why=why)


def scaled(rules: Rules, installation: Installation, now: Outlook) -> Proposal | None:
    """Return the change in number to make."""
    if not rules.scales:
        return None
    return (
        _for_decode(rules, installation, now)
        or _for_prefill(rules, installation, now)
        or _for_the_wait(rules, installation, now)
        or _fewer(rules, installation, now)
    )


def _growing(installation: Installation, role: Role) -> list[Pool]:
    return [
        pool
        for pool in installation.pools
        if pool.role == role and not pool.refusal and pool.most is not None and pool.replicas < pool.most
    ]


def _shrinking(pools: Iterable[Pool]) -> list[Pool]:
    return [pool for pool in pools if not pool.refusal and pool.most is not None and pool.replicas > _least(pool)]


def _least(pool: Pool) -> int:
    """Return the fewest instances to leave: one, where nobody says otherwise."""
    if pool.least is None:
        return 1
    return max(1, pool.least) if pool.role == "decode" else pool.least


def _with(installation: Installation, pool: Pool, replicas: int) -> Outlook:
    return outlook(installation, {**installation.counts, pool.name: replicas})


def _for_decode(rules: Rules, installation: Installation, now: Outlook) -> Proposal | None:
    pool = next(iter(_growing(installation, "decode")), None)
    if pool is None or now.decode_load <= rules.target_load:
        return None
    return _enough(rules, installation, pool, now)


def _for_prefill(rules: Rules, installation: Installation, now: Outlook) -> Proposal | None:
    if now.prefill_load <= rules.target_load:
        return None
    pools = _growing(installation, "prefill")
    tried = {pool.name: _with(installation, pool, pool.replicas + 1).prefill_per_second for pool in pools}
    useful = [pool for pool in pools if tried[pool.name] > now.prefill_per_second]
    if useful:
        return _enough(rules, installation, max(useful, key=lambda pool: tried[pool.name]), now)
    # An instance has to run before it is measured.
    new = next((pool for pool in pools if not pool.replicas and pool.profile is None), None)
    if new is None:
        return None
    why = f"prefill is {percent(now.prefill_load)} busy, and what {new.name} could do is not known"
    return propose("Scaling", installation, now, {new.name: 1}, why)


def _enough(rules: Rules, installation: Installation, pool: Pool, now: Outlook) -> Proposal:
    """Return so many more that the pool's stage is below its target, if that many may be added."""

    def load(seen: Outlook) -> float:
        return seen.decode_load if pool.role == "decode" else seen.prefill_load

    most, wanted = min(pool.most or 0, max(1, 2 * pool.replicas)), pool.replicas + 1
    while wanted < most and load(_with(installation, pool, wanted)) > rules.target_load:
        wanted += 1
    why = f"{pool.role} is {percent(load(now))} busy, above {rules.target_load:.0%}"
    return propose("Scaling", installation, now, {pool.name: wanted}, why)


def _for_the_wait(rules: Rules, installation: Installation, now: Outlook) -> Proposal | None:
    """Return the instance that shortens a wait that is too long most, by a tenth at least."""
    promised = rules.ttft_seconds
    if promised is None or (expected := ttft_p90_seconds(installation, now)) <= promised:
        return None
    times = {
        pool.name: ttft_p90_seconds(installation, _with(installation, pool, pool.replicas + 1))
        for role in ("decode", "prefill")
        for pool in _growing(installation, role)
    }
    best = min(times, key=lambda name: times[name], default=None)
    if best is None or not math.isfinite(times[best]) or times[best] > (1 - MIN_GAIN) * expected:
        return None
    why = f"P90 of the first token is {expected:.3g} s where {promised:.3g} s are promised"
    return propose("Scaling", installation, now, {best: installation.counts[best] + 1}, why)


def _fewer(rules: Rules, installation: Installation, now: Outlook) -> Proposal | None:
    """Return the instance that is missed least, if the rest has room without it."""
    tried = [(pool, _with(installation, pool, pool.replicas - 1)) for pool in _shrinking(installation.pools)]
    room = [(pool, seen) for pool, seen in tried if _has_room(rules, installation, seen)]
    if not room:
        return None
    pool, seen = max(room, key=lambda one: one[1].lambda_max)
    busy = f"prefill would be {percent(seen.prefill_load)} busy and decode {percent(seen.decode_load)}"
    return propose("Scaling", installation, now, {pool.name: pool.replicas - 1}, f"without it {busy}")


def _has_room(rules: Rules, installation: Installation, seen: Outlook) -> bool:
    if seen.busiest > ROOM_SHARE * rules.target_load:
        return False
    return rules.ttft_seconds is None or ttft_p90_seconds(installation, seen) <= ROOM_SHARE * rules.ttft_seconds
