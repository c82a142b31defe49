"""Published traces of real serving, read line by line: lines in, arrivals out; opening files is the caller's.

Mooncake (JSON lines: timestamp, input_length, output_length, hash_ids), the conversation trace:
- `timestamp` is in milliseconds, and stands for the start of an interval of about 3 s: some ten requests share each.
  Served as they stand they would be bursts that never happened, so the requests of one stamp are spread evenly over the
  time to the next one.
- `hash_ids` name blocks of 512 tokens and stand for everything before them too. The last block may not be full, and
  its name then matches nothing but the very same prompt.

Azure 2023 (CSV: TIMESTAMP, ContextTokens, GeneratedTokens), the code and conversation traces:
- `TIMESTAMP` has seven decimals, one more than most readers take.
- There are no prefixes: nothing can be shared.
- A request that generated nothing counts as one token, as in the other trace; there is no newline after the last line.
"""

import csv
from collections.abc import Iterable, Iterator
from datetime import datetime
from itertools import groupby
from operator import attrgetter

import msgspec

from prfaas.errors import ConfigError
from prfaas.simulate.request import Arrival

MOONCAKE_BLOCK_TOKENS = 512
AZURE_COLUMNS = ["TIMESTAMP", "ContextTokens", "GeneratedTokens"]


class _MooncakeLine(msgspec.Struct):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]


def read(name: str, lines: Iterable[str]) -> list[Arrival]:
    """Return the requests of a trace in order of time, which starts at 0. The first line tells the format.

    Raises:
        ConfigError: it names the trace, the line and what is wrong: nothing there, torn, or going back in time.

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
        except msgspec.MsgspecError as error:
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
