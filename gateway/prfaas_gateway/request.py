"""One request from its first byte to its last: what was received, what is known of its prompt, and its progress.

A GatewayRequest never changes. Progress is the only record that does, from the first byte to the access log line. The
gateway relays the body's original bytes and parses them once. One pass finds the top level's fields, and reads the
values of those that make prompts: no request keeps them after they are measured and matched. A body that gets another
salt is written anew at once, and what came is dropped: each request holds one body. A rewrite, for that or for a
foreign engine, keeps the text of every field.
"""

import asyncio
import hashlib
import logging
import re
import time
import uuid
from collections.abc import Callable, Collection, Mapping, Set
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final, NamedTuple, TypeVar

import msgspec
from aiohttp import web

from prfaas.bounds.bodies import BodyPlace
from prfaas.bounds.requests import KNOWN_BYTES, check_fields
from prfaas.engines import ENGINES
from prfaas.errors import UNREADABLE, BadInputError, CapacityError, RequestError
from prfaas.http_server import UNREADABLE_BODY, unreadable_body
from prfaas.kvindex.bytes import ByteChain
from prfaas.routing.facts import Route
from prfaas.routing.prompt_size import LARGE_BYTES
from prfaas.telemetry.logs import line, tell
from prfaas.telemetry.tracing import Span
from prfaas.util import count_marks
from prfaas.wire import headers
from prfaas.wire.preferences import NO_PREFERENCES, Preferences, read_deadline_seconds, read_preferences
from prfaas.wire.profile import Profile
from prfaas.wire.routes import EngineName
from prfaas.wire.trace import LegTimes, Parts, at_gateway, named_seconds, read_parts
from prfaas_gateway.api import API_ROUTES, ApiRoute
from prfaas_gateway.auth import Charge
from prfaas_gateway.limits import Limits
from prfaas_gateway.metrics import RequestOutcome
from prfaas_gateway.openai import DeadlineError, SaturatedError
from prfaas_gateway.stream import AnswerStream, is_stream
from prfaas_gateway.upstream import Answer

log = logging.getLogger(__name__)

# Workers read everything else in the body. An allow-list keeps out hop-by-hop headers, credentials meant for the
# gateway, and x-prfaas-* headers that would let a client choose where its prompt is computed.
FORWARDED_HEADERS: Final = ("Content-Type", "Accept")
_REQUEST_ID: Final = re.compile(r"[A-Za-z0-9._:/+=-]{1,128}")

Fields = Mapping[str, msgspec.Raw]
"""A body's top level: each field with its original text."""
MAX_FIELDS: Final = 1000
"""The most fields of a body, by far: each is kept until its answer ends, if engines of others need it."""
COUNTED_BYTES: Final = 1 << 20
"""A larger body is read aside in any case: to count its values takes long, of 16 MiB 16 ms."""
SOME_VALUES: Final = 5000
"""A body of more takes longer than a few milliseconds to read."""
_ABSENT: Final = msgspec.Raw()
_Read = TypeVar("_Read")

_PROMPT_FIELDS: Final = sorted(frozenset[str]().union(*(one.fields for one in API_ROUTES.values())) - {"model"})
"""The fields that prompts are made of in any API."""


def _known_fields(kind: Any) -> msgspec.json.Decoder[Any]:
    """Return a reader of the model and of those fields, as values of some kind; it skips all others."""
    # Token ids are many: they are counted as they are written.
    kinds = dict.fromkeys(_PROMPT_FIELDS, kind) | {"prompt": msgspec.Raw}
    fields = [(name, one, _ABSENT) for name, one in kinds.items()]
    return msgspec.json.Decoder(msgspec.defstruct("KnownFields", [("model", str), *fields]))


STEERING_FIELDS: Final = frozenset[str]().union(*(one.steering_fields for one in ENGINES.values()))
"""Fields by which an engine would read or write a cache, or compute, at a place of the client's choice."""
_known_values, _known_raws = _known_fields(Any), _known_fields(msgspec.Raw)
_every_field = msgspec.json.Decoder(dict[str, msgspec.Raw])
_object = msgspec.json.Decoder(dict[str, msgspec.Raw] | None)
_model = msgspec.json.Decoder(str)
_salt = msgspec.json.Decoder(str | None)
_SALT: Final = "cache_salt"


@dataclass(frozen=True, kw_only=True)
class GatewayRequest:
    """What a client sent; see `receive`."""

    api: ApiRoute
    request_id: str
    model: str
    body: bytes
    """The body for an engine: as it came, or written anew with the salt."""
    fields: Fields
    """All fields of the body if `has_every_field`, else none."""
    has_every_field: bool = False
    places: tuple[str, ...] = ()
    """The other clusters whose cached bytes may serve it, as they were when it was read: no others give it any."""
    has_place_salt: bool = False
    """Whether it was read for engines whose caches are divided by these places."""
    headers: Mapping[str, str]
    """Headers for the worker."""
    preferences: Preferences = NO_PREFERENCES
    deadline_seconds: float | None = None
    """The deadline by the event loop's clock."""

    @property
    def path(self) -> str:
        return self.api.path

    @cached_property
    def has_many_values(self) -> bool:
        """Whether to read them takes longer than a few milliseconds."""
        return len(self.body) > COUNTED_BYTES or count_marks(self.body) > SOME_VALUES

    @cached_property
    def digest(self) -> bytes:
        found = hashlib.sha256(f"{self.path}\n".encode())
        found.update(self.body)
        return found.digest()

    @cached_property
    def every_field(self) -> Fields:
        """All fields of the body. Raises RequestError for a field that clients must not set."""
        if self.has_every_field:
            return self.fields
        # The table got its first engine of others after the body was read.
        return read_fields(self.body, every=True)[1]


class ReadingWay(NamedTuple):
    """How a body is read."""

    every_field: bool
    salt_of: Callable[[str], str] | None = None
    """Makes the salt of its cached prompts of the one that it has, and needs every field. None: the client's own."""
    salt_objects: Set[str] = frozenset()
    """Objects of the body that get it, too."""
    places: tuple[str, ...] = ()
    has_place_salt: bool = False
    """As of the request."""


class PromptFacts(NamedTuple):
    """What the gateway knows of a request's prompt."""

    total_tokens: int = 0
    """Its estimated length, or its exact one."""
    no_hand_off: Set[EngineName] = frozenset()
    """Engines that cannot hand over the cache of such a request."""
    chain: ByteChain | None = None
    """Its byte blocks; None without a prefix match."""
    cached_on: Mapping[str, int] = {}
    """Estimated cached tokens of the prompt, by instance."""
    cached_on_ranks: Mapping[str, tuple[int, ...]] = {}
    """Likewise by rank, for instances of several data-parallel ranks."""
    profiles: Mapping[str, Profile] = {}
    """The instances' profiles."""
    is_exact: bool = False
    """Whether an engine has counted its length."""


class AnswerStart(NamedTuple):
    """What came with the first token: its time, and the worker's counts."""

    seconds: float | None = None
    """Since the request's beginning; None: there was no token."""
    prompt_tokens: int = 0
    """The prompt's exact length; 0: unknown."""
    cached_tokens: int = 0
    parts: Mapping[str, float] = {}
    """Of the time to it; none: that is unknown, since the whole answer came at once."""


@dataclass(slots=True)
class Progress:
    """How far a request has come. Its attempts write it; the access log line and the span are made of it at the end."""

    # Known before its attempts.
    span: Span
    began_seconds: float = field(default_factory=time.monotonic)
    peer: str = ""
    """The address that it came from: the client's, or that of a proxy before it."""
    client: str = ""
    """The client of its API key; empty if no keys are required."""
    key_digest: str = ""
    """Of an API key that is unknown; empty without one."""
    request_id: str = ""
    """Empty until the body has arrived. The log names also a request whose body is refused."""
    prompt: PromptFacts = field(default_factory=PromptFacts)
    charge: Charge | None = None
    """What its client is charged; None before its length was estimated."""

    # Its route.
    first_route: Route | None = None
    """Metrics count the request under this decision."""
    route: Route | None = None
    """The last route."""
    threshold_tokens: int = 0
    tried: set[str] = field(default_factory=set[str])
    refused: set[str] = field(default_factory=set[str])
    """Instances that cannot serve it, or refuse to resume its stream."""
    lost: list[str] = field(default_factory=list[str])
    """Instances that got the request, and closed their connections before its answer began or soon after."""
    had_last_resort: bool = False
    """Whether it was given an ejected instance since no other could serve it: once, and no wait follows."""
    stream: AnswerStream | None = None
    """Its answer, after the first byte was sent to the client."""

    # Its outcome.
    outcome: RequestOutcome = "failed"
    status: int | None = None
    """None: the client left before there was one."""
    reason: str = ""
    """The reason of the failure."""
    fell_back: bool = False
    resumes: int = 0
    """How often another worker resumed its stream."""
    transfer_id: str = ""
    answer_start: AnswerStart = field(default_factory=AnswerStart)

    @property
    def decision(self) -> str:
        """The decision label: `offload`, `local`, or `none` before a decision."""
        return self.first_route.kind if self.first_route else "none"

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began_seconds

    def forget_tried(self) -> None:
        """Let all instances be tried again but those that refused."""
        self.tried = set(self.refused)

    def note_first_token(self, answer: Answer, leg_began: float, prefilled: float | None) -> float:
        """Record the first token, its parts and the worker's counts; return the seconds to it. The answer's leg
        `leg_began` then, and the leg of its source, if there was one, was answered `prefilled`."""
        seconds, prompt_tokens, cached_tokens = self.seconds, 0, 0
        with suppress(ValueError):  # an engine that reports no count
            prompt_tokens = int(answer.headers.get(headers.PROMPT_TOKENS, ""))
            cached_tokens = int(answer.headers.get(headers.CACHED_TOKENS, ""))
        reported: Parts = {}
        with suppress(BadInputError):  # an engine that reports no parts
            reported = read_parts(answer.headers.get(headers.TTFT_SECONDS, ""))
        queue_seconds = leg_began - self.began_seconds
        leg = LegTimes(
            seconds - queue_seconds, None if prefilled is None else prefilled - leg_began, is_stream=is_stream(answer)
        )
        self.answer_start = AnswerStart(seconds, prompt_tokens, cached_tokens, at_gateway(queue_seconds, leg, reported))
        return seconds

    def note_transfer(self, answer: Answer | None) -> None:
        """Record the transfer that an answer names, even a failed one."""
        if answer is not None:
            self.transfer_id = answer.headers.get(headers.TRANSFER_ID) or self.transfer_id

    def log_failed_leg(self, leg: str, instance: str, reason: str) -> None:
        ids = {"request_id": self.request_id, "transfer_id": self.transfer_id}
        log.warning(line("leg failed", **ids, leg=leg, instance=instance, reason=reason))
        self.span.event("leg failed", leg=leg, instance=instance, reason=reason)

    def close(self) -> None:
        """Write the access log line and end the span, with the same fields."""
        if self.outcome in ("failed", "rejected"):
            self.span.fail(self.reason or f"HTTP {self.status}")
        fields = self._log_fields()
        if log.isEnabledFor(logging.INFO):
            trace_id, seconds = self.span.context.trace_id, self.seconds
            tell(log, line("request", **fields, trace_id=trace_id, seconds=seconds, reason=self.reason))
        self.span.set(**fields)
        self.span.end()

    def _log_fields(self) -> dict[str, str | int | float]:
        fields: dict[str, str | int | float] = {
            "request_id": self.request_id,
            "transfer_id": self.transfer_id,
            "decision": self.decision,
            "outcome": self.outcome,
            "estimated_tokens": self.prompt.total_tokens,
        }
        for name in ("peer", "client", "key_digest"):
            if value := getattr(self, name):
                fields[name] = value
        if self.resumes:
            fields["resumes"] = self.resumes
        if self.status is not None:
            fields["status"] = self.status
        if self.route is not None:
            prefilled_by = self.route.prefill or self.route.decode
            fields |= {
                "pool": prefilled_by.pool,
                "cluster": prefilled_by.cluster,
                "prefill_instance": prefilled_by.name,
                "decode_instance": self.route.decode.name,
                "threshold_tokens": self.threshold_tokens,
                "why": self.route.reason,
            }
        if parts := self.answer_start.parts:
            fields |= {"first_token_seconds": sum(parts.values()), **named_seconds(parts)}
        return fields


async def read_aside(request: GatewayRequest, read: Callable[[], _Read]) -> _Read:
    """Return what `read` makes of a body: in a thread if that has many values, so that no stream must wait."""
    return await asyncio.to_thread(read) if request.has_many_values else read()


async def receive(
    http: web.Request,
    progress: Progress,
    limits: Limits,
    place: BodyPlace,
    find_way: Callable[[Preferences], ReadingWay],
) -> tuple[GatewayRequest, Mapping[str, Any]]:
    """Read and check a request's headers and body; return also its fields, as `read_fields` does.

    `find_way` is asked once the body is there: a routing table may have come with it.

    Raises DeadlineError if the deadline passes first, SaturatedError without room in `place`. Raises RequestError: 413
    for a too large body, 408 for a slow one, 400 for one that is not a JSON object with a model, and for a bad header.
    """
    deadline_seconds = _read_deadline(http)
    preferences = read_preferences(_only_once(http))
    received = await _read_body(http, limits, place, deadline_seconds)
    client_id = http.headers.get(headers.REQUEST_ID, "")
    request_id = progress.request_id = client_id if _REQUEST_ID.fullmatch(client_id) else uuid.uuid4().hex
    way = find_way(preferences)
    if way.every_field and len(received) > KNOWN_BYTES:
        # Of a large body each value is checked: other streams must not wait.
        model, fields, body = await asyncio.to_thread(read_salted, received, way)
    else:
        model, fields, body = read_salted(received, way)
    sent = {name: http.headers[name] for name in FORWARDED_HEADERS if name in http.headers}
    sent |= {headers.REQUEST_ID: request_id, headers.PLACES: " ".join(way.places)}
    # A span of ours; without tracing, the context that came.
    sent.update(progress.span.context.headers())
    request = GatewayRequest(
        api=API_ROUTES[http.path],
        request_id=request_id,
        model=model,
        body=body,
        fields=fields if way.every_field else {},
        has_every_field=way.every_field,
        places=way.places,
        has_place_salt=way.has_place_salt,
        headers=sent,
        preferences=preferences,
        deadline_seconds=deadline_seconds,
    )
    return request, fields


def read_fields(body: bytes | bytearray, *, every: bool) -> tuple[str, Mapping[str, Any]]:
    """Return a body's model and its fields: all as they are written if `every`, else the values of those of prompts.

    Raises RequestError with 400 if the body is not a JSON object with a model.
    """
    try:
        if every:
            fields = _every_field.decode(body)
            if len(fields) > MAX_FIELDS:
                raise RequestError(f"the request body has {len(fields)} fields, more than {MAX_FIELDS}: leave some out")
            _refuse_steering(fields)
            check_fields(fields)
            return _model.decode(fields.get("model", b"null")), fields
        known = _read_known(body)
    except msgspec.ValidationError as error:
        raise RequestError(
            f"the request body is not valid: {error}; it needs a string `model`", param="model"
        ) from error
    except UNREADABLE as error:
        raise RequestError(f"the request body is not JSON: {error}", code="invalid_json") from error
    return known.model, {name: value for name in _PROMPT_FIELDS if (value := getattr(known, name)) is not _ABSENT}


def place_salt(places: Collection[str], salt: str) -> str:
    """Return the salt of prompts whose cached bytes these places may have given, 64 hexadecimal digits; `salt` is the
    client's, empty for none."""
    given = sorted(set(places) - {headers.UNKNOWN_PLACE})
    return hashlib.sha256(msgspec.json.encode((given, salt))).hexdigest()


def read_salted(received: bytes | bytearray, way: ReadingWay) -> tuple[str, Mapping[str, Any], bytes]:
    """Return the model and the fields of what came, with their salt, and the body for an engine."""
    if way.salt_of is None:
        body = bytes(received)
        return *read_fields(body, every=way.every_field), body
    model, fields = read_fields(received, every=way.every_field)
    return model, *_write(_with_cache_salt(fields, way.salt_of, way.salt_objects))


def _write(fields: Fields) -> tuple[Fields, bytes]:
    """Return the body of these fields, behind the same fields as parts of it, which keep no other body in memory."""
    body = msgspec.json.encode(fields)
    view, end, parts = memoryview(body), 0, dict[str, msgspec.Raw]()
    for name, written in fields.items():
        begin = end + len(msgspec.json.encode(name)) + 2  # behind a bracket or a comma, and the colon
        end = begin + len(written)
        parts[name] = msgspec.Raw(view[begin:end])
    return parts, body


def _with_cache_salt(fields: Fields, salt_of: Callable[[str], str], objects: Set[str]) -> Fields:
    """Return fields with the salt that `salt_of` makes of their own, also in these objects; empty: they have none.

    Raises RequestError if their own is no text.
    """
    try:
        sent = _salt.decode(fields.get(_SALT, b"null"))
    except UNREADABLE as error:
        raise RequestError(f"cache_salt must be a string: {error}", param=_SALT) from error
    if sent == "":
        raise RequestError("cache_salt must have a character or more; leave it out for none", param=_SALT)
    salt = {_SALT: msgspec.Raw(msgspec.json.encode(salt_of(sent or "")))}
    salted = {**fields, **salt}
    for name in objects:
        with suppress(msgspec.ValidationError):  # what is no object is the engine's to refuse
            members = _object.decode(fields.get(name, b"null")) or {}
            salted[name] = msgspec.Raw(msgspec.json.encode({**members, **salt}))
    return salted


def _read_known(body: bytes | bytearray) -> Any:
    """Return the known fields; as they are written if the body is large, or has a value that is not readable here."""
    if len(body) <= LARGE_BYTES:
        with suppress(*UNREADABLE, ValueError):  # the latter for numbers of thousands of digits
            return _known_values.decode(body)
    return _known_raws.decode(body)


def _find_steering_objects() -> Mapping[str, Set[str]]:
    """Return the objects of a body that a client may write, each with the fields that it may not have."""
    found: dict[str, Set[str]] = {}
    for one in ENGINES.values():
        for name, fields in one.steering_objects.items():
            found[name] = found.get(name, STEERING_FIELDS) | fields
    return found


STEERING_OBJECTS: Final = _find_steering_objects()


def _refuse_steering(fields: Fields) -> None:
    """Raise RequestError for a field by which an engine would read or write a cache at a place of the client's choice.

    The gateway alone writes these, for the legs of a request.
    """
    found = set(STEERING_FIELDS & fields.keys())
    for name in STEERING_OBJECTS.keys() & fields.keys():
        with suppress(msgspec.ValidationError):  # what is no object is the engine's to refuse
            members = _every_field.decode(fields[name]).keys()
            found |= {f"{name}.{member}" for member in STEERING_OBJECTS[name] & members}
    if found:
        name = min(found)
        raise RequestError(f"the field {name} is set by the gateway, not by clients: leave it out", param=name)


def _only_once(http: web.Request) -> Mapping[str, str]:
    """Return the headers; refuse repeated preference headers, of which one would be ignored."""
    for name in (headers.DATACENTERS, headers.OFFLOAD, headers.DEADLINE_SECONDS):
        if name in http.headers and len(http.headers.getall(name)) > 1:
            raise RequestError(f"the header {name} is repeated; send it once", code="invalid_header", param=name)
    return http.headers


def _read_deadline(http: web.Request) -> float | None:
    text = http.headers.get(headers.DEADLINE_SECONDS)
    return None if text is None else asyncio.get_running_loop().time() + read_deadline_seconds(text)


async def _read_body(http: web.Request, limits: Limits, place: BodyPlace, deadline_seconds: float | None) -> bytearray:
    too_large = RequestError(
        f"the request body exceeds {limits.request_bytes} bytes; send a shorter prompt",
        status=413,
        code="request_too_large",
    )
    if (http.content_length or 0) > limits.request_bytes:
        raise too_large
    latest_seconds = asyncio.get_running_loop().time() + limits.idle_seconds
    try:
        place.expect(http.content_length or 0)
        # aiohttp's own read() unpacks a compressed body in pieces as large as its limit.
        body = bytearray()
        async with place.arriving(min(latest_seconds, deadline_seconds or latest_seconds)):
            async for piece in http.content.iter_any():
                place.take(len(piece))
                body += piece
                if len(body) > limits.request_bytes:
                    raise too_large
                await place.turn()
        return body
    except CapacityError as error:
        raise SaturatedError(str(error)) from error
    except UNREADABLE_BODY as error:
        raise unreadable_body(error) from error
    except TimeoutError as error:
        if deadline_seconds is not None and deadline_seconds < latest_seconds:
            raise DeadlineError("the deadline passed before the request's body arrived") from error
        message = f"the request body did not arrive within {limits.idle_seconds:g} s"
        raise RequestError(message, status=408, code="request_timeout") from error
