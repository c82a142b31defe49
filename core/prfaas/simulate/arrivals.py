"""When requests come, and how long they are: a Poisson process, with bursts, over a workload; or a trace, at any rate.

Bursts change the rate and not the load: `rate_per_second` is the mean, and a burst is `factor` times as dense as what
lies between bursts. A random source is an argument, so the same seed gives the same requests whatever serves them.

Prompts that go on from earlier ones share their blocks, as far as the shorter of both reaches: conversations that come
back longer, and documents that are asked about again. Lengths and times are those of prompts that share nothing.
"""

import math
from collections import deque
from collections.abc import Iterable, Iterator

import msgspec

from prfaas.capacity.workload import Randomness, Workload
from prfaas.errors import ConfigError
from prfaas.simulate.request import Arrival

BLOCK_TOKENS = 512
_DRAWN_TOGETHER = 1024
_REMEMBERED_PROMPTS = 1000


class Bursts(msgspec.Struct, frozen=True, kw_only=True):
    """The first `for_seconds` of every `every_seconds` are `factor` times as dense as the rest."""

    every_seconds: float
    for_seconds: float
    factor: float


def poisson(
    workload: Workload, output_tokens: int, rate_per_second: float, rng: Randomness, bursts: Bursts | None = None
) -> Iterator[Arrival]:
    """Yield requests for ever, at a mean rate, with answers of one length.

    Raises:
        ConfigError: rate, length or bursts make no sense.

    """
    if not 0 < rate_per_second < math.inf:
        raise ConfigError(f"arrivals.ratePerSecond is {rate_per_second:g}; it must be above 0")
    if output_tokens < 1:
        raise ConfigError(f"workload.outputTokens is {output_tokens}; it must be at least 1")
    warp = None if bursts is None else _Warp(bursts)
    drawn = _poisson(workload, rate_per_second, rng)
    return (Arrival(warp.seconds(even) if warp else even, tokens, output_tokens) for even, tokens in drawn)


def _poisson(workload: Workload, rate_per_second: float, rng: Randomness) -> Iterator[tuple[float, int]]:
    even_seconds = 0.0
    while True:
        for tokens in workload.sample(rng, _DRAWN_TOGETHER):
            even_seconds -= math.log(1.0 - rng.random()) / rate_per_second
            yield even_seconds, tokens


class _Warp:
    """Maps the time of an even process to that of one with bursts, and of the same mean rate."""

    def __init__(self, bursts: Bursts):
        if not (0 < bursts.for_seconds < bursts.every_seconds < math.inf and 1 <= bursts.factor < math.inf):
            raise ConfigError(
                f"simulation.bursts say {bursts.for_seconds:g} s of every {bursts.every_seconds:g} s, "
                f"{bursts.factor:g} times as dense; the first must be below the second, the factor at least 1"
            )
        self._every_seconds = bursts.every_seconds
        self._for_seconds = bursts.for_seconds
        share = bursts.for_seconds / bursts.every_seconds
        self._rest_rate = 1 / (share * bursts.factor + 1 - share)
        self._burst_rate = bursts.factor * self._rest_rate

    def seconds(self, even_seconds: float) -> float:
        """Return when it happens."""
        periods, rest = divmod(even_seconds, self._every_seconds)
        burst_seconds = rest / self._burst_rate
        if burst_seconds > self._for_seconds:
            burst_seconds = self._for_seconds + (rest - self._for_seconds * self._burst_rate) / self._rest_rate
        return periods * self._every_seconds + burst_seconds


def sharing(arrivals: Iterable[Arrival], share: float, rng: Randomness) -> Iterator[Arrival]:
    """Yield the arrivals with blocks of `BLOCK_TOKENS`; this share of them goes on from one of the latest prompts.

    Raises:
        ConfigError: the share is none.

    """
    if not 0 <= share <= 1:
        raise ConfigError(f"simulation.prefixShare is {share:g}; it must be between 0 and 1")
    return _sharing(arrivals, share, rng)


def _sharing(arrivals: Iterable[Arrival], share: float, rng: Randomness) -> Iterator[Arrival]:
    latest: deque[tuple[int, ...]] = deque(maxlen=_REMEMBERED_PROMPTS)
    named = 0
    for one in arrivals:
        full, rest = divmod(one.input_tokens, BLOCK_TOKENS)
        goes_on = latest and rng.random() < share
        parent = latest[int(rng.random() * len(latest))][:full] if goes_on else ()
        new = full - len(parent) + (rest > 0)
        blocks = (*parent, *range(named, named + new))
        named += new
        latest.append(blocks[:full])
        yield one._replace(blocks=blocks)


def at_rate(arrivals: Iterable[Arrival], rate_per_second: float) -> Iterator[Arrival]:
    """Return the arrivals of a trace, their times stretched evenly to a mean rate and beginning at 0.

    Raises:
        ConfigError: there are not two requests at different times, or the rate makes no sense.

    """
    known = list(arrivals)
    first, last = (known[0].at_seconds, known[-1].at_seconds) if known else (0.0, 0.0)
    if last <= first:
        raise ConfigError(f"the trace has {len(known)} requests within no time; a rate needs two at different times")
    if not 0 < rate_per_second < math.inf:
        raise ConfigError(f"the rate is {rate_per_second:g} requests/s; it must be above 0")
    stretch = (len(known) - 1) / rate_per_second / (last - first)
    return (one._replace(at_seconds=(one.at_seconds - first) * stretch) for one in known)
