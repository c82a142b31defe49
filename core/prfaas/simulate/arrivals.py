"""Arrivals: when requests come and how long they are, drawn at random or read from a published trace.

Random requests are a Poisson process over a workload. Bursts change the rate and not the load. `rate_per_second` is the
mean, and a burst is `factor` times as dense as the time between bursts. The random source is an argument, so the same
seed gives the same requests whatever serves them. Prompts that continue earlier ones share their blocks, as far as the
shorter one reaches. Such are conversations that come back longer, and documents that are asked about again.

Traces are read line by line; the caller opens the files.

Mooncake (JSON lines: timestamp, input_length, output_length, hash_ids), the conversation trace:
- `timestamp` is in milliseconds, and stands for the start of an interval of about 3 s that some ten requests share.
  Served as they stand they would be bursts that never happened. So the requests of one stamp are spread evenly over the
  time to the next one.
- `hash_ids` name blocks of 512 tokens and stand for everything before them too. The last block may not be full, and
  its name then matches only the very same prompt.

Azure 2023 (CSV: TIMESTAMP, ContextTokens, GeneratedTokens), the code and conversation traces:
- `TIMESTAMP` has seven decimals, one more than most readers take.
- There are no prefixes: no blocks can be shared.
- A request that generated nothing counts as one token, as in the other trace. There is no newline after the last line.
"""

import csv
import math
from collections import deque
from collections.abc import Iterable, Iterator
from datetime import datetime
from itertools import groupby, takewhile
from operator import attrgetter

import msgspec

from prfaas.capacity.workload import Randomness, Workload
from prfaas.errors import UNREADABLE, ConfigError
from prfaas.simulate.request import Arrival

BLOCK_TOKENS = 512
_DRAWN_TOGETHER = 1024
_REMEMBERED_PROMPTS = 1000
MOONCAKE_BLOCK_TOKENS = 512
AZURE_COLUMNS = ["TIMESTAMP", "ContextTokens", "GeneratedTokens"]


class Bursts(msgspec.Struct, frozen=True, kw_only=True):
    """The first `for_seconds` of every `every_seconds` are `factor` times as dense as the rest."""

    every_seconds: float
    for_seconds: float
    factor: float


def poisson(
    workload: Workload, output_tokens: int, rate_per_second: float, rng: Randomness, bursts: Bursts | None = None
) -> Iterator[Arrival]:
    """Yield requests for ever, at a mean rate, with answers of one length; raises ConfigError for senseless figures."""
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


def shifting(first: Iterable[Arrival], later: Iterable[Arrival], at_seconds: float) -> Iterator[Arrival]:
    """Yield the first arrivals until a time, and from then on the others, whose own times begin there."""
    yield from takewhile(lambda one: one.at_seconds < at_seconds, first)
    for one in later:
        yield one._replace(at_seconds=at_seconds + one.at_seconds)


def sharing(arrivals: Iterable[Arrival], share: float, rng: Randomness) -> Iterator[Arrival]:
    """Yield the arrivals with blocks of `BLOCK_TOKENS`; this share of them goes on from one of the latest prompts.

    Raises ConfigError for a share that is not between 0 and 1.
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

    Raises ConfigError without two requests at different times, or for a rate that makes no sense.
    """
    known = list(arrivals)
    first, last = (known[0].at_seconds, known[-1].at_seconds) if known else (0.0, 0.0)
    if last <= first:
        raise ConfigError(f"the trace has {len(known)} requests within no time; a rate needs two at different times")
    if not 0 < rate_per_second < math.inf:
        raise ConfigError(f"the rate is {rate_per_second:g} requests/s; it must be above 0")
    stretch = (len(known) - 1) / rate_per_second / (last - first)
    return (one._replace(at_seconds=(one.at_seconds - first) * stretch) for one in known)


def in_whole_blocks(arrivals: Iterable[Arrival]) -> Iterator[Arrival]:
    """Yield the arrivals with prompts that end one token behind their last whole block.

    What follows in a part of a block has no name. So a prompt that was served as long as it is would leave its state
    where no later one of the trace goes on.
    """
    for one in arrivals:
        whole = one.input_tokens // BLOCK_TOKENS
        tokens = whole * BLOCK_TOKENS + 1 if whole else one.input_tokens
        yield one._replace(input_tokens=tokens, blocks=one.blocks[:whole])


class _MooncakeLine(msgspec.Struct):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]


def read_trace(name: str, lines: Iterable[str]) -> list[Arrival]:
    """Return the requests of a trace in order of time, which starts at 0. The first line tells the format.

    Raises ConfigError with the trace, the line and what is wrong: nothing there, torn, or going back in time.
    """
    numbered = iter([(number, line) for number, line in enumerate(lines, 1) if line.strip()])
    first = next(numbered, None)
    if first is None:
        raise ConfigError(f"{name} is empty: a trace has a request a line")
    if first[1].lstrip().startswith("{"):
        found = _spread(_mooncake(name, [first, *numbered]))
    elif first[1].strip().lstrip("\ufeff").split(",") == AZURE_COLUMNS:
        found = _azure(name, numbered)
    else:
        raise ConfigError(
            f"{name}, line {first[0]}: this is no trace; it must be JSON lines with timestamp, input_length, "
            f"output_length, hash_ids, or CSV with the columns {','.join(AZURE_COLUMNS)}"
        )
    return _checked(name, found)


def _mooncake(name: str, lines: Iterable[tuple[int, str]]) -> list[Arrival]:
    decoder = msgspec.json.Decoder(_MooncakeLine)
    found: list[Arrival] = []
    for number, line in lines:
        try:
            one = decoder.decode(line)
        except UNREADABLE as error:
            raise ConfigError(f"{name}, line {number}: {error}; the line is torn or of another format") from error
        blocks = -(-one.input_length // MOONCAKE_BLOCK_TOKENS)
        if len(one.hash_ids) != blocks:
            raise ConfigError(
                f"{name}, line {number}: {len(one.hash_ids)} hash_ids for input_length {one.input_length}; "
                f"blocks of {MOONCAKE_BLOCK_TOKENS} tokens would be {blocks}"
            )
        found.append(Arrival(one.timestamp / 1000, one.input_length, max(1, one.output_length), one.hash_ids))
    return found


def _spread(found: list[Arrival]) -> Iterator[Arrival]:
    """Yield the requests of each time stamp evenly over the time to the next; those of the last keep theirs."""
    groups = [list(group) for _, group in groupby(found, attrgetter("at_seconds"))]
    for group, following in zip(groups, [*groups[1:], groups[-1]], strict=True):
        gap_seconds = (following[0].at_seconds - group[0].at_seconds) / len(group)
        for place, one in enumerate(group):
            yield one._replace(at_seconds=one.at_seconds + place * gap_seconds)


def _azure(name: str, lines: Iterator[tuple[int, str]]) -> Iterator[Arrival]:
    began: datetime | None = None
    for number, line in lines:
        try:
            (stamp, tokens, generated), *_ = csv.reader([line])
            at = datetime.fromisoformat(stamp)
            input_tokens, output_tokens = int(tokens), int(generated)
            began = began or at
            yield Arrival((at - began).total_seconds(), input_tokens, max(1, output_tokens))
        except (ValueError, TypeError) as error:
            raise ConfigError(f"{name}, line {number}: {error}; the line is torn or of another format") from error


def _checked(name: str, arrivals: Iterable[Arrival]) -> list[Arrival]:
    found: list[Arrival] = []
    before_seconds = 0.0
    for place, one in enumerate(arrivals, 1):
        if one.at_seconds < before_seconds:
            raise ConfigError(f"{name}, request {place}: it comes before the one above it; sort the trace by time")
        if one.input_tokens < 1:
            raise ConfigError(f"{name}, request {place}: its input length is {one.input_tokens}; give at least 1 token")
        before_seconds = one.at_seconds
        found.append(one)
    if not found:
        raise ConfigError(f"{name} has no requests: there is nothing after its first line")
    return found
