"""`prfaas explain REQUEST_ID`: says from logs where a request's time to its first token went.

The gateway's line of the request has all parts. The lines of the instances, from both clusters, add what its transfers
did. Lines may be text or JSON, and may have a collector's words before them. No number is made of a damaged line.
"""

import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Final, NamedTuple

import msgspec
import typer
from rich import box
from rich.console import Console
from rich.table import Table

from prfaas.console import TableOrJson, echo_json
from prfaas.errors import UNREADABLE, BadInputError, ConfigError
from prfaas.names import HUB
from prfaas.wire.trace import MAX_OFF, PARTS, UNKNOWN, read_seconds

STANDARD_INPUT: Final = "-"
ROUNDED_SECONDS: Final = 0.0005
"""By how much the parts of a line may miss their sum, since each has four digits."""
_TEXT: Final = re.compile(r"\b(?:DEBUG|INFO|WARNING|ERROR) (.*?): (.*)")
_FIELD: Final = re.compile(r' ([a-z_]+)=("(?:[^"\\]|\\.)*"|\S*)')
_JSON_BEGINS: Final = '{"time"'


class LogLine(NamedTuple):
    """A line of a program of ours: where it was read, who wrote it, its words, and its fields."""

    source: str
    place: str
    words: str
    fields: dict[str, str]


class ExplainedPart(msgspec.Struct):
    """A part of the time, or UNKNOWN, the rest of it; None: no log has it."""

    part: str
    seconds: float | None
    share: float | None
    where: str


class Explanation(msgspec.Struct):
    """Where a request's time to its first token went, and what the instances say of its transfers."""

    request_id: str
    decision: str
    outcome: str
    first_token_seconds: float
    parts: list[ExplainedPart]
    transfers: list[dict[str, str]]


def explain(
    request_id: Annotated[str, typer.Argument(help="The request's id, x-request-id of its answer.")],
    log: Annotated[
        list[str] | None,
        typer.Option(metavar="FILE", help="A log of gateway or instances, of either cluster; may be repeated."),
    ] = None,
    output: TableOrJson = "table",
) -> None:
    """Say where a request's time to its first token went, from the logs of gateway and instances; without --log they
    come from standard input.

    Example: prfaas explain slow-1 --log hub.log --log member.log.
    """
    names = log or [STANDARD_INPUT]
    with ExitStack() as opened:
        lines = ((name, line) for name in names for line in _open(name, opened))
        found = explanation(request_id, lines, " and ".join(_called(name) for name in names))
    if output == "json":
        echo_json(found)
    else:
        _show(found)


def explanation(request_id: str, lines: Iterable[tuple[str, str]], looked_at: str) -> Explanation:
    """Return what these lines, each with its file's name, say of a request. Raises BadInputError if that is nothing."""
    counts = Counter[str]()
    found: dict[str, LogLine] = {}  # a line that is in two files is one
    for name, text in lines:
        counts[name] += 1
        line = read_line(f"{name}, line {counts[name]}", text) if request_id in text else None
        if line is not None and request_id in line.fields.get("request_id", ""):
            found.setdefault(f"{line.place} {line.words} {line.fields}", line)
    ours, count = [one for one in found.values() if one.fields.get("request_id") == request_id], counts.total()
    requests = [one for one in ours if one.words == "request"]
    if not ours:
        raise BadInputError(f"none of the {count} lines of {looked_at} is about the request {request_id!r}")
    if not requests:
        places = ", ".join(sorted({one.place for one in ours}))
        raise BadInputError(
            f"{looked_at} has lines about the request {request_id!r} of {places}, but none of the gateway, "
            "which writes one at the request's end: give its log, too"
        )
    if len(requests) > 1:
        raise BadInputError(
            f"{looked_at} has {len(requests)} requests with the id {request_id!r}, and their lines cannot be separated"
        )
    # vLLM makes an id of its own around that of the request: the gateway has named the transfer.
    named = set(requests[0].fields.get("transfer_id", "").split(","))
    ended = [one for one in found.values() if one.words in ("transfer sent", "transfer received")]
    return _explained(requests[0], [one for one in ended if one in ours or one.fields.get("transfer_id") in named])


def read_line(source: str, text: str) -> LogLine | None:
    """Return a line of ours, None for any other."""
    if (begin := text.find(_JSON_BEGINS)) >= 0:
        try:
            document = msgspec.json.decode(text[begin:], type=dict[str, str])
        except UNREADABLE:
            return None
        place, message = document.get("place", ""), document.get("message", "")
    elif found := _TEXT.search(text):
        place, message = found[1], found[2]
    else:
        return None
    fields = dict(_fields(message))
    return LogLine(source, place, _FIELD.split(message, 1)[0], fields)


def _fields(message: str) -> Iterator[tuple[str, str]]:
    for name, value in _FIELD.findall(message):
        try:
            yield name, msgspec.json.decode(value, type=str) if value.startswith('"') else value
        except UNREADABLE:
            yield name, value


def _explained(line: LogLine, transfers: list[LogLine]) -> Explanation:
    fields, request_id = line.fields, line.fields["request_id"]
    if "first_token_seconds" not in fields:
        why = fields.get("reason") or "its engine does not report when the first token of a whole answer came"
        outcome = fields.get("outcome", "unknown")
        raise BadInputError(f"the request {request_id!r} (outcome {outcome}) has no time to a first token: {why}")
    total = _seconds(line, "first_token")
    known = {part: _seconds(line, part) for part in (*PARTS, UNKNOWN) if f"{part}_seconds" in fields}
    if abs(sum(known.values()) - total) > max(MAX_OFF * total, len(known) * ROUNDED_SECONDS):
        raise BadInputError(
            f"{line.source}: the parts add up to {sum(known.values()):.4f} s and the first token took {total:.4f} s: "
            "the line is damaged"
        )
    known = _with_transfer(known, transfers)
    where = _places(fields)
    parts = [
        ExplainedPart(part, known.get(part), known[part] / total if part in known and total else None, where[part])
        for part in (*PARTS, *({UNKNOWN} & known.keys()))
    ]
    shown = [{"place": one.place, "what": one.words, **one.fields} for one in transfers]
    return Explanation(request_id, fields.get("decision", ""), fields.get("outcome", ""), total, parts, shown)


def _with_transfer(known: dict[str, float], transfers: list[LogLine]) -> dict[str, float]:
    """Divide what the gateway could not see of another engine, by the line of its slowest transfer. Only durations are
    used: two machines' clocks differ."""
    needed = {"computed_seconds", "first_byte_seconds", "flow_seconds"}
    lines = [one for one in transfers if one.fields.keys() >= needed]
    if UNKNOWN not in known or "transfer" in known or "prefill" not in known or not lines:
        return known
    line = max(lines, key=lambda one: _seconds(one, "flow"))
    overlap = _seconds(line, "computed") - _seconds(line, "first_byte")
    link_wait = min(max(0.0, -overlap), known[UNKNOWN])
    transfer = min(max(0.0, _seconds(line, "flow") - max(0.0, overlap)), known[UNKNOWN] - link_wait)
    return known | {"link_wait": link_wait, "transfer": transfer, UNKNOWN: known[UNKNOWN] - link_wait - transfer}


def _places(fields: dict[str, str]) -> dict[str, str]:
    """Return where each part happened: a cluster and an instance, or the link between two."""
    decode, source = fields.get("decode_instance", ""), fields.get("prefill_instance", "")
    cluster = fields.get("cluster", "")
    if fields.get("outcome") == "fallback":  # its route names the source that failed
        source, cluster = decode, HUB
    here, there = f"{HUB}, {decode}", f"{cluster}, {source}"
    link = "" if source == decode else f"{cluster} to {HUB}" if cluster != HUB else f"inside {HUB}"
    return {
        **dict.fromkeys(PARTS, here),
        "gateway_queue": f"{HUB}, gateway",
        "prefill_queue": there,
        "prefill": there,
        "link_wait": link,
        "transfer": link,
        UNKNOWN: "",
    }


def _seconds(line: LogLine, part: str) -> float:
    name = f"{part}_seconds"
    try:
        return read_seconds(name, line.fields[name])
    except BadInputError as error:
        raise BadInputError(f"{line.source}: {error}: the line is damaged") from error


def _show(found: Explanation) -> None:
    console = Console(highlight=False, markup=False, soft_wrap=True)
    console.print(
        f"{found.request_id}: {found.first_token_seconds:.3f} s to the first token ({found.decision}, {found.outcome})"
    )
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("part")
    table.add_column("seconds", justify="right")
    table.add_column("share", justify="right")
    table.add_column("where")
    for one in found.parts:
        seconds = "unknown" if one.seconds is None else f"{one.seconds:.3f}"
        share = "" if one.share is None else f"{one.share:.0%}"
        table.add_row(one.part.replace("_", " "), seconds, share, one.where)
    console.print(table)
    for one in found.transfers:
        known = (f"{name} {one[name]}" for name in ("outcome", "bytes", "seconds", "mbps", "reason") if name in one)
        console.print(f"{one['place']}: {one['what']}, {', '.join(known)}")


def _open(name: str, opened: ExitStack) -> Iterable[str]:
    if name == STANDARD_INPUT:
        if sys.stdin.isatty():
            raise ConfigError("there is no log: give --log FILE, or pipe the logs of both clusters in")
        return (raw.decode(errors="replace") for raw in sys.stdin.buffer)
    try:
        return opened.enter_context(Path(name).open(encoding="utf-8", errors="replace"))
    except OSError as error:
        raise ConfigError(f"the log {name} cannot be read: {error.strerror}") from error


def _called(name: str) -> str:
    return "standard input" if name == STANDARD_INPUT else name
