"""Time to the first token: as the paper counts it, and with the waits that it leaves out.

As the paper counts it (`unloaded`) a prompt costs its prefill. If it is offloaded, its whole cache then crosses the
link at the link's rate. Nothing waits.

With queueing (`queued`) arrivals are Poisson, and

- each prefill instance has its own queue, and a request joins the one with the fewest. A request waits with the
  probability C of Erlang's formula for c instances. Those that do wait for

      E[W | W > 0] = E[T] (1 + cv^2) / 2 * (1 / (c (1 - rho)) + (c - 1) / (2 c))

  on average, exponentially distributed. The first term is Lee and Longton's M/G/c, exact (Pollaczek-Khinchine) with one
  server. The second is what separate queues cost beside a shared one, fitted to simulations of 2 to 20 instances
- an instance computes in steps, which are full while prompts wait (`prfaas.schedule`). So a prompt that others are
  behind ends later than its work: `_followed_seconds`
- a link is shared evenly by its transfers (M/G/1 processor sharing), which stretches each by 1 / (1 - rho)
- a transfer overlaps its prefill: after it only the last chunk and the states remain, unless the link is the slower
- decode instances admit a request when one of their N_d BS_max places is free. All answers are of equal length, which
  halves the wait (M/D/c). The first token takes a step. Where others decode, it waits for the rest of theirs, half of
  one in the mean, and for the one that admits it.

The waits are taken as independent of each other and of the lengths. So a class of lengths differs from another by its
prefills and transfers, and by the pools that take it. Fractional plans have no such queues to speak of.

Prompts are served in their order. The half of each step that is for the shortest prompt is left out. A new prompt of
work b behind one with R > b left makes that one b later, and is itself R - b earlier than in their order. Both are the
same on average if b is anything up to R. And it is rare where a prompt goes to the instance with the fewest tokens.
With one or two instances, high load and very different lengths the means are too long.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Final, NamedTuple

import msgspec

from prfaas.capacity.equations import BITS_PER_MBIT, egress_mbps, mean_seconds, offload_shares
from prfaas.capacity.optimum import Plan
from prfaas.capacity.profile import best_step_tokens, cache_bytes, prefill_seconds
from prfaas.capacity.system import OffloadPool, System
from prfaas.capacity.workload import Workload
from prfaas.errors import ConfigError
from prfaas.schedule import role_budgets
from prfaas.wire.profile import Profile

CHUNK_TOKENS: Final = 8192
"""Tokens of a prefill that are computed, and handed to the link, together."""
_POINTS: Final = 128
_PRECISION: Final = 1e-4
_ROUNDING: Final = 1e-12


class FirstToken(msgspec.Struct, frozen=True, kw_only=True):
    """The distribution of the time to the first token, over all requests."""

    mean_seconds: float
    p50_seconds: float
    p90_seconds: float
    p99_seconds: float


class _Wait(NamedTuple):
    """A wait that comes with a probability, and is then exponential with a mean."""

    probability: float
    mean_seconds: float


class _Stream(NamedTuple):
    """The share of the requests that goes one way, their wait for a prefill, and (seconds, weight) of what follows.

    There is a point for each of the lengths, in their order, until `_coarse` makes them fewer.
    """

    share: float
    wait: _Wait
    lengths: Sequence[int]
    points: list[tuple[float, float]]


class _Work(NamedTuple):
    """Prompts of one length: the seconds of their prefill, from its start to the first token, and their weight."""

    tokens: int
    seconds: float
    first_seconds: float
    weight: float


class _Decode(NamedTuple):
    """The share of the requests that a pool decodes, their wait for a place, and the seconds to a token with one."""

    share: float
    wait: _Wait
    first_seconds: float


_NONE: Final = _Wait(0.0, 0.0)


def unloaded(system: System, workload: Workload, plan: Plan) -> FirstToken:
    """Return the times as the paper counts them: prefill, then transfer at the link's rate, and no waiting."""

    def offloaded(pool: OffloadPool, tokens: int) -> float:
        crossing = 8 * cache_bytes(pool.profile, tokens) / (system.link(pool.link).capacity_mbps * BITS_PER_MBIT)
        return prefill_seconds(pool.profile, tokens) + crossing

    streams = _streams(system, workload, plan, None, offloaded)
    points = sorted((seconds, stream.share * weight) for stream in streams for seconds, weight in stream.points)
    reached = list(accumulate(weight for _, weight in points))

    def quantile(share: float) -> float:
        return points[min(bisect_left(reached, share - _ROUNDING), len(points) - 1)][0]

    return FirstToken(
        mean_seconds=math.fsum(seconds * weight for seconds, weight in points),
        p50_seconds=quantile(0.5),
        p90_seconds=quantile(0.9),
        p99_seconds=quantile(0.99),
    )


def queued(system: System, workload: Workload, plan: Plan, arrivals: float) -> FirstToken:
    """Return the times, with waits, at this rate of all requests a second.

    Raises ConfigError where the plan does not carry this rate, or divides instances between roles.
    """
    streams, decodes = _waiting(system, workload, plan, arrivals)
    return _summary(_coarse(streams), decodes)


def mean_by_class(
    system: System, workload: Workload, plan: Plan, arrivals: float, edges_tokens: Sequence[int]
) -> list[float]:
    """Return the mean, with waits, of each class of lengths, at this rate of all requests a second; 0: nothing waits.

    A class ends with its edge and begins above the one before; each must hold prompts, and the last edge all of them.
    Raises ConfigError as `queued` does.
    """
    streams, decodes = _waiting(system, workload, plan, arrivals)
    shares, seconds = [0.0] * len(edges_tokens), [0.0] * len(edges_tokens)
    for stream in streams:
        before = stream.wait.probability * stream.wait.mean_seconds
        for tokens, (after, weight) in zip(stream.lengths, stream.points, strict=True):
            place = bisect_left(edges_tokens, tokens)
            shares[place] += stream.share * weight
            seconds[place] += stream.share * weight * (before + after)
    decode = _mean(decodes)
    return [total / share + decode for total, share in zip(seconds, shares, strict=True)]


def arrivals_within(system: System, workload: Workload, plan: Plan, p90_seconds: float) -> float:
    """Return the highest rate of requests at which the P90 of the time to the first token stays within a limit.

    Raises ConfigError where even the first request of the day takes longer.
    """

    def p90(arrivals: float) -> float:
        streams, decodes = _waiting(system, workload, plan, arrivals)
        return _quantile(_coarse(streams), decodes, 0.9)

    if p90(0.0) > p90_seconds:
        raise ConfigError(
            f"slo.ttftMillis is {1000 * p90_seconds:g}, but one request in ten takes over {1000 * p90(0.0):.0f} ms "
            "to its first token when nothing waits; raise it, or take faster prefill instances"
        )
    low, high = 0.0, plan.lambda_max
    while high - low > _PRECISION * plan.lambda_max:
        middle = (low + high) / 2
        low, high = (middle, high) if p90(middle) <= p90_seconds else (low, middle)
    return low


def _waiting(system: System, workload: Workload, plan: Plan, arrivals: float) -> tuple[list[_Stream], list[_Decode]]:
    """Return the streams at this rate, and what follows at the pools that decode."""
    if not 0 <= arrivals < plan.lambda_max:
        raise ConfigError(
            f"{arrivals:g} requests/s arrive where {plan.lambda_max:.4g} can be served: queues would grow for ever; "
            "lower the rate or add instances"
        )
    above = workload.above(threshold(workload, plan))
    carried = egress_mbps(offload_shares(system, above), above, arrivals)
    free = {link.name: link.capacity_mbps - carried.get(link.name, 0.0) for link in system.links}

    def offloaded(pool: OffloadPool, tokens: int) -> float:
        bits_per_second = free[pool.link] * BITS_PER_MBIT
        last_bytes = cache_bytes(pool.profile, (tokens - 1) % CHUNK_TOKENS + 1)
        prefilled = prefill_seconds(pool.profile, tokens) + 8 * last_bytes / bits_per_second
        return max(prefilled, 8 * cache_bytes(pool.profile, tokens) / bits_per_second)

    return _streams(system, workload, plan, arrivals, offloaded), _decodes(system, plan, arrivals)


def threshold(workload: Workload, plan: Plan) -> int:
    """Return the tokens above which the plan offloads: 0, or the longest length, where all prompts go the same way."""
    if plan.threshold_tokens is not None:
        return plan.threshold_tokens
    return 0 if plan.offloaded_fraction > 0 else workload.max_tokens


def _streams(
    system: System,
    workload: Workload,
    plan: Plan,
    arrivals: float | None,
    offloaded: Callable[[OffloadPool, int], float],
) -> list[_Stream]:
    """Divide the requests among the pools that prefill them; without arrivals nothing waits."""
    tokens = threshold(workload, plan)
    above, below = workload.above(tokens), workload.below(tokens)
    long = [(n, weight) for n, weight in workload.items() if n > tokens]
    short = [(n, weight) for n, weight in workload.items() if n <= tokens]
    streams: list[_Stream] = []
    for pool, rate in offload_shares(system, above) if above else ():
        if rate == 0:
            continue
        work = [_Work(n, prefill_seconds(pool.profile, n), offloaded(pool, n), weight) for n, weight in long]
        share = above.share * rate / plan.theta_prfaas
        streams.append(_stream(share, pool.instances, pool.profile, work, arrivals))
    for pool in system.hub if below else ():
        instances = plan.split[pool.name]
        if instances == 0:
            continue
        work = [_Work(n, seconds := prefill_seconds(pool.profile, n), seconds, weight) for n, weight in short]
        share = below.share * instances / mean_seconds(pool.profile, below) / plan.theta_pd_p
        streams.append(_stream(share, instances, pool.profile, work, arrivals))
    return streams


def _stream(share: float, instances: float, profile: Profile, work: Sequence[_Work], arrivals: float | None) -> _Stream:
    wait, later = _NONE, [0.0] * len(work)
    total = sum(one.weight for one in work)
    if arrivals:
        mean = sum(one.seconds * one.weight for one in work) / total
        squared = sum(one.seconds**2 * one.weight for one in work) / total
        wait = _wait(instances, mean, squared / mean**2, arrivals * share)
        # Who waits does so for the rest of the prompt under way, and for so many more, whose number is geometric.
        more = max(0.0, wait.mean_seconds - squared / (2 * mean)) / mean
        later = _followed_seconds(work, wait.probability, more / (1 + more), _prefill_tokens(profile))
    points = [(one.first_seconds + end, one.weight / total) for one, end in zip(work, later, strict=True)]
    return _Stream(share, wait, [one.tokens for one in work], points)


def _prefill_tokens(profile: Profile) -> int:
    """Return the tokens of a step of an instance that only prefills."""
    return role_budgets(best_step_tokens(profile))["prefill"].step_tokens


def _followed_seconds(work: Sequence[_Work], followed: float, early: float, step_tokens: int) -> list[float]:
    """Return how much later than its work each prompt ends, in the mean, because of those behind it.

    Its tokens after the last whole block take a step of their own (`cut_tokens` in `prfaas.simulate.instance`, as in
    the worker). Those behind fill this step, and what is left of the one before: half of a step in the mean. What comes
    in a step is computed from the second step after it on. So what comes two steps before the last fills the last
    alone, and what comes later nothing. None fills more of a step than it has work.

    As many prompts leave others behind as find others before them, since a queue changes by one at a time. So
    `followed` is the probability of a wait. `early` is the share of the followers that were there when the prompt came
    to its turn. The others come at any time of its prefill.
    """
    total = sum(one.weight for one in work)
    mean = sum(one.seconds * one.weight for one in work) / total
    step_seconds = step_tokens * mean * total / sum(one.tokens * one.weight for one in work)

    def filled(steps: float) -> float:
        return sum(min(one.seconds, steps * step_seconds) * one.weight for one in work) / total

    last, most, in_step = filled(1.0), filled(1.5), (1 - early) * step_seconds / mean

    def later(whole_steps: int) -> float:
        meanwhile = in_step * (last + (whole_steps - 1) * most) if whole_steps else 0.0
        return min(most, followed * (early * most + meanwhile))

    return [later((one.tokens - 1) // step_tokens) for one in work]


def _decodes(system: System, plan: Plan, arrivals: float) -> list[_Decode]:
    """Return what each pool of the hub that decodes adds."""
    found: list[_Decode] = []
    for pool in system.hub:
        instances = pool.instances - plan.split[pool.name]
        if instances > 0:
            rate = instances * pool.decode_rate(system.output_tokens)
            share = rate / plan.theta_pd_d
            places, busy = instances * pool.max_batch, arrivals * share / rate
            mean = pool.step_seconds * system.output_tokens / 2 / (places * (1 - busy))
            alone = math.exp(-busy * pool.max_batch)  # as many decode as arrive in an answer's time
            first_seconds = pool.step_seconds * (1 + 1.5 * (1 - alone))
            found.append(_Decode(share, _Wait(_erlang(places, busy), mean), first_seconds))
    return found


def _wait(instances: float, mean_seconds: float, relative_square: float, arrivals: float) -> _Wait:
    """Return the wait at instances with a queue each; `relative_square` is E[T^2] / E[T]^2 = 1 + cv^2."""
    if not float(instances).is_integer():
        raise ConfigError(f"{instances:g} instances prefill: waits are known for whole instances only")
    busy = arrivals * mean_seconds / instances
    queues = 1 / (instances * (1 - busy)) + (instances - 1) / (2 * instances)
    return _Wait(_erlang(instances, busy), mean_seconds * relative_square / 2 * queues)


def _erlang(servers: float, busy: float) -> float:
    """Return Erlang's C: the probability that all servers are busy, each for this share of its time."""
    blocked, load = 1.0, servers * busy
    for count in range(1, round(servers) + 1):
        blocked = load * blocked / (count + load * blocked)
    return blocked / (1 - busy * (1 - blocked))


def _coarse(streams: Sequence[_Stream]) -> list[_Stream]:
    """Return the streams with few points each, as a quantile needs them: it looks at all of them again and again."""
    return [stream._replace(lengths=(), points=_points(stream.points)) for stream in streams]


def _points(items: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return a distribution as few points of nearly equal probability, each the mean of those it stands for."""
    if len(items) <= _POINTS:
        return items
    points: list[tuple[float, float]] = []
    seconds = share = 0.0
    for value, weight in sorted(items):
        seconds += value * weight
        share += weight
        if share >= 1 / _POINTS:
            points.append((seconds / share, share))
            seconds = share = 0.0
    return [*points, (seconds / share, share)] if share > 0 else points


def _summary(streams: Sequence[_Stream], decodes: Sequence[_Decode]) -> FirstToken:
    mean = _mean(decodes)
    for stream in streams:
        after = sum(seconds * weight for seconds, weight in stream.points)
        mean += stream.share * (stream.wait.probability * stream.wait.mean_seconds + after)
    return FirstToken(
        mean_seconds=mean,
        p50_seconds=_quantile(streams, decodes, 0.5),
        p90_seconds=_quantile(streams, decodes, 0.9),
        p99_seconds=_quantile(streams, decodes, 0.99),
    )


def _mean(decodes: Sequence[_Decode]) -> float:
    return sum(one.share * (one.wait.probability * one.wait.mean_seconds + one.first_seconds) for one in decodes)


def _quantile(streams: Sequence[_Stream], decodes: Sequence[_Decode], share: float) -> float:
    """Return the time that this share of the requests does not exceed, by bisection."""

    def longer(limit: float) -> float:
        return sum(
            stream.share
            * decode.share
            * weight
            * _longer(stream.wait, decode.wait, limit - seconds - decode.first_seconds)
            for stream in streams
            for decode in decodes
            for seconds, weight in stream.points
        )

    low, high = 0.0, max(seconds for stream in streams for seconds, _ in stream.points)
    while longer(high) > 1 - share + _ROUNDING:
        low, high = high, 2 * high
    while high - low > _PRECISION * high:
        middle = (low + high) / 2
        low, high = (middle, high) if longer(middle) > 1 - share else (low, middle)
    return high


def _longer(first: _Wait, second: _Wait, limit: float) -> float:
    """P(first + second > limit), for two independent waits."""
    if limit < 0:
        return 1.0
    a = math.exp(-limit / first.mean_seconds) if first.mean_seconds > 0 else 0.0
    b = math.exp(-limit / second.mean_seconds) if second.mean_seconds > 0 else 0.0
    both = a + b  # of a wait that cannot happen nothing counts
    if first.mean_seconds > 0 and second.mean_seconds > 0:
        apart = first.mean_seconds - second.mean_seconds
        if abs(apart) < 1e-6 * first.mean_seconds:
            both = a * (1 + limit / first.mean_seconds)
        else:
            both = (first.mean_seconds * a - second.mean_seconds * b) / apart
    p, q = first.probability, second.probability
    return p * (1 - q) * a + (1 - p) * q * b + p * q * both
