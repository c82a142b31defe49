"""The common parts of engine protocols: an attempt, errors of a leg, parallel legs, and bodies with added fields.

Foreign engines need fields of their own in a body. All other values keep the client's text, so that numbers and long
prompts arrive unchanged.
"""

import asyncio
import re
import time
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, Protocol
from urllib.parse import urlsplit

import msgspec

from prfaas.engines import ENGINES
from prfaas.errors import UNREADABLE, LostError, PeerError, RequestError, UnreachableError
from prfaas.names import BOOTSTRAP_PORT
from prfaas.ports import url_host
from prfaas.routing.facts import LegName, Route
from prfaas.wire import headers
from prfaas.wire.routes import EngineName, Instance
from prfaas.wire.streams import STREAM_FIELD
from prfaas_gateway.openai import read_error
from prfaas_gateway.request import Fields, GatewayRequest
from prfaas_gateway.stream import ResumeLog
from prfaas_gateway.upstream import Answer, Upstream

OURS: Final = "x-prfaas-"
ERROR_EVENT: Final = b'data: {"error"'
_ONE: Final = msgspec.Raw(b"1")
_FALSE: Final = msgspec.Raw(b"false")
# Engines answer 400 to stream_options without a stream, and to more min_tokens than max_tokens, which is one here.
_OF_DECODING: Final = frozenset(
    {
        "stream_options",
        "min_tokens",
        "return_token_ids",
        STREAM_FIELD,
        "n",
        "best_of",
        "logprobs",
        "top_logprobs",
        "logit_bias",
        "echo",
    }
)
"""Fields that concern answers alone. An instance that answers nothing would check them all the same."""
_NULL: Final = msgspec.Raw(b"null")
_BATCH: Final = re.compile(rb'\s*\[\s*["\[]')
_DIVISIBLE: Final = {
    "n": (b"null", b"1"),
    "best_of": (b"null", b"1"),
    "use_beam_search": (b"null", b"false"),
    "prompt_logprobs": (b"null",),
    "prompt_embeds": (b"null",),
    # Of the Responses API: answers that one instance keeps, and goes on with.
    "previous_response_id": (b"null",),
    "background": (b"null", b"false"),
}
"""The values with which a request has one prompt and one answer, and its prompt is needed for that alone."""


class _Tool(msgspec.Struct):
    type: str = ""


class LegFailedError(PeerError):
    """A leg failed before any byte of the answer was relayed, so the request may be retried at another instance.

    `eject` is False for an instance that is only full, `refuses` is True for one that would refuse the request again,
    `is_loss` for a stream of which its engine may have died. The client gets the worker's error `answer` if no other
    instance can serve.
    """

    def __init__(
        self,
        message: str,
        *,
        leg: LegName,
        eject: bool,
        answer: Answer | None = None,
        refuses: bool = False,
        is_loss: bool = False,
    ):
        super().__init__(message)
        self.leg: LegName = leg
        self.eject = eject
        self.answer = answer
        self.refuses = refuses
        self._is_loss = is_loss

    @property
    def lost_connection(self) -> bool:
        """Whether the engine may have died of the request."""
        return self._is_loss or isinstance(self.__cause__, LostError)


@dataclass(slots=True)
class Attempt:
    """One attempt to serve a request along a route: what its engine needs besides the request, and what it notes."""

    route: Route
    ranks: Mapping[str, int]
    """The chosen rank of each instance of the route that takes one."""
    broken: ResumeLog | None
    """The log of the answer that this attempt resumes; None: there is no answer yet."""
    may_recompute: bool
    """Whether the decode instance may compute the prompt itself after a failed prefill leg."""
    place_of: Callable[[str], str]
    """What the cached bytes of a cluster are known by."""
    log: ResumeLog | None = None
    """The log of its answer; None: no other instance could continue it."""
    transfer_id: str = ""
    """The transfer that the gateway itself named."""
    began_seconds: float = field(default_factory=time.monotonic)
    prefilled_seconds: float | None = None
    """When its prefill leg was answered; None before that, and without one."""


class EngineProtocol(Protocol):
    """A protocol between gateway and workers. It reports which leg failed; `prfaas.routing` decides what to do then."""

    async def open(self, request: GatewayRequest, attempt: Attempt) -> Answer:
        """Run all legs of a route and return the client's answer, from its first token on.

        Raises LegFailedError for a failed leg (nothing was sent to the client), TimeoutError for a late first token.
        """
        ...


class Leg(NamedTuple):
    name: LegName
    instance: Instance
    body: bytes
    headers: Mapping[str, str] = {}
    path: str = ""
    """Empty: the request's own."""
    awaits_piece: bool = True
    """Whether its answer begins with a stream's first piece: other engines than ours send headers before that."""


def plain_headers(request: GatewayRequest) -> dict[str, str]:
    """Return a request's headers for a foreign engine: with the request's id, without ours."""
    return {name: value for name, value in request.headers.items() if not name.lower().startswith(OURS)}


async def call(upstream: Upstream, request: GatewayRequest, attempt: Attempt, leg: Leg) -> Answer:
    """Run one leg and return its answer, which may be a refusal of the request itself (4xx).

    Raises LegFailedError if the instance cannot be reached or cannot serve (5xx).
    """
    rank = {headers.DATA_RANK: str(attempt.ranks[leg.instance.name])} if leg.instance.name in attempt.ranks else {}
    try:
        sent = {**plain_headers(request), **rank, **leg.headers}
        answer = await upstream.post(
            leg.instance, leg.path or request.path, sent, leg.body, await_piece=leg.awaits_piece
        )
    except UnreachableError as error:
        raise LegFailedError(str(error), leg=leg.name, eject=True) from error
    if answer.status >= 500 and (leg.name == "prefill" or answer.status == 503):
        is_full = answer.status == 503
        answer.close()
        message = f"{leg.instance.name} answered HTTP {answer.status} to its {leg.name} leg"
        raise LegFailedError(message, leg=leg.name, eject=not is_full, answer=answer)
    if leg.name == "prefill" and leg.instance is attempt.route.prefill:
        attempt.prefilled_seconds = time.monotonic()
    return answer


async def call_both(
    upstream: Upstream,
    request: GatewayRequest,
    attempt: Attempt,
    prefill: Leg,
    decode: Leg,
    *,
    may_recompute: bool = False,
) -> Answer:
    """Run two legs at once; return the answer of the decode leg, or a prefill instance's refusal of the request.

    Raises LegFailedError if either fails; the other leg is aborted. With `may_recompute` the decode instance continues
    without a prefill instance that died or whose cache did not come, and `lost_prefill` returns that failure.
    """
    filling = asyncio.create_task(call_to_its_end(upstream, request, attempt, prefill))
    decoding = asyncio.create_task(call(upstream, request, attempt, decode))
    try:
        await asyncio.wait({filling, decoding}, return_when=asyncio.FIRST_COMPLETED)
        if filling.done() and not (may_recompute and _is_unreachable(filling.exception())):
            refusal = filling.result()
            if refusal is not None:
                await _drop(decoding, filling)
                return refusal
        answer = _Tied(await decoding, filling, may_recompute=may_recompute)
    except BaseException:
        await _drop(decoding, filling)
        raise
    if (failure := answer.lost_cache) is not None and not may_recompute:
        answer.close()
        raise failure
    return answer


async def call_to_its_end(upstream: Upstream, request: GatewayRequest, attempt: Attempt, leg: Leg) -> Answer | None:
    """Run a leg whose answer nobody reads; return None after success, else its refusal of the request. Raises as
    `call`."""
    answer = await call(upstream, request, attempt, leg)
    try:
        if answer.body is None:
            while await answer.read():
                pass  # that token is not used
        return answer if answer.status >= 400 else None
    finally:
        answer.close()


async def _drop(decoding: asyncio.Task[Answer], filling: asyncio.Task[Answer | None]) -> None:
    decoding.cancel()
    filling.cancel()
    # A cancelled call may have ended a moment before, with an answer whose connection nobody else closes.
    (answer, _) = await asyncio.gather(decoding, filling, return_exceptions=True)
    if isinstance(answer, Answer):
        answer.close()


def _is_unreachable(error: BaseException | None) -> bool:
    """Whether a leg's instance died or is not reachable; else it answered, and only the gateway knows its answer."""
    return isinstance(error, LegFailedError) and isinstance(error.__cause__, UnreachableError)


def lost_prefill(answer: Answer) -> LegFailedError | None:
    """Return the failure of an answer's prefill leg, for which the decode instance made up."""
    return answer.lost_prefill if isinstance(answer, _Tied) else None


class _Tied(Answer):
    """The answer of a decode leg whose prefill leg may still run: closing one cancels the other."""

    def __init__(self, answer: Answer, filling: asyncio.Task[Answer | None], *, may_recompute: bool):
        self.status, self.headers, self.body = answer.status, answer.headers, answer.body
        self.first = answer.first
        self._answer = answer
        self._response = answer._response  # it replaces the answer
        self._filling = filling
        if not may_recompute:
            filling.add_done_callback(self._prefill_ended)

    def close(self) -> None:
        super().close()
        self._filling.cancel()

    @property
    def lost_prefill(self) -> LegFailedError | None:
        """The failure of a prefill leg that has ended, or whose cache did not come."""
        if self._filling.done() and not self._filling.cancelled():
            error = self._filling.exception()
            if isinstance(error, LegFailedError):
                return error
        return self.lost_cache

    @property
    def lost_cache(self) -> LegFailedError | None:
        """The failure of a data path, which only the decode instance sees."""
        lost = self.headers.get(headers.LOST_TRANSFER, "")
        if not lost:
            return None
        is_unreachable = lost.endswith(headers.UNREACHABLE)
        return LegFailedError("its cache did not come to the decode instance", leg="prefill", eject=is_unreachable)

    def _prefill_ended(self, filling: asyncio.Task[Answer | None]) -> None:
        """Cut the answer off after a failed prefill: the decode leg would wait for its cache for ever."""
        if not filling.cancelled() and (filling.exception() is not None or filling.result() is not None):
            self._answer.close()


def check_begun(answer: Answer, *, with_prefill: bool) -> Answer:
    """Return an answer that has begun; raise LegFailedError if it is an error of the instance instead.

    The first event of a stream may be an error. With `kv_load_failure_policy: fail`, a lost cache is one.
    """
    is_error = answer.status == 500 and with_prefill
    if answer.status == 200 and answer.first.startswith(ERROR_EVENT):
        code = read_error(answer.first.split(b"\n\n")[0].removeprefix(b"data: ")).get("code")
        is_error = not isinstance(code, int) or code >= 500
    if not is_error:
        return answer
    answer.close()
    if with_prefill:
        raise LegFailedError("the decode instance could not use the cache", leg="prefill", eject=False, answer=answer)
    raise LegFailedError("the instance's stream began with an error", leg="decode", eject=True, is_loss=True)


def with_fields(fields: Fields, added: Mapping[str, Any]) -> bytes:
    """Return a body of these fields; fields in `added` replace those of the same name."""
    return msgspec.json.encode(added_to(fields, added))


def added_to(fields: Fields, added: Mapping[str, Any]) -> Fields:
    """Return fields with those in `added`, which replace those of the same name."""
    return {**fields, **{name: msgspec.Raw(msgspec.json.encode(value)) for name, value in added.items()}}


def for_prefill(fields: Fields, added: Mapping[str, Any], answer_limit: str = "max_tokens") -> bytes:
    """Return the body of a leg that only prefills: one token and no stream."""
    kept = {name: value for name, value in fields.items() if name not in _OF_DECODING}
    kept |= {"stream": _FALSE, answer_limit: _ONE}
    # In a chat it comes before max_tokens.
    if "max_completion_tokens" in kept:
        kept["max_completion_tokens"] = _ONE
    return with_fields(kept, added)


def without_hand_off(request: GatewayRequest) -> Set[EngineName]:
    """Return the engines that cannot hand over the cache of such a request from a prefill to a decode instance.

    Most engines take one hand-off a request. So several prompts or answers, beams, and log probabilities of the prompt
    need the whole prompt where it is decoded. Tools of the server's own lead to several prompts, too.
    """
    is_batch = request.has_every_field and (prompts(request.fields) or 1) > 1
    is_whole = request.has_every_field and _needs_whole_prompt(request)
    return {
        name
        for name, one in ENGINES.items()
        if request.path not in one.hand_offs or (is_whole and one.is_one_sequence) or (is_batch and one.is_one_prompt)
    }


def _needs_whole_prompt(request: GatewayRequest) -> bool:
    """Whether a request has several prompts or answers, or needs its prompt for more than its answer."""
    fields = request.fields
    whole = any(bytes(fields.get(name, _NULL)) not in plain for name, plain in _DIVISIBLE.items())
    with_prompt = bytes(fields.get("echo", _NULL)) == b"true" and bytes(fields.get("logprobs", _NULL)) != b"null"
    return whole or with_prompt or _is_batch(fields) or _has_server_tools(request)


def _has_server_tools(request: GatewayRequest) -> bool:
    """Whether a request of the Responses API has tools that the server calls."""
    if request.path != "/v1/responses":
        return False
    try:
        tools = msgspec.json.decode(request.fields.get("tools", _NULL), type=list[_Tool] | None)
    except UNREADABLE:
        return True
    return any(tool.type != "function" for tool in tools or ())


def _is_batch(fields: Fields) -> bool:
    return _BATCH.match(fields.get("prompt", _NULL)) is not None


def prompts(fields: Fields) -> int | None:
    """Return the number of prompts in a completion's list, None for a single prompt.

    Raises RequestError for a list that cannot be read: the body was, by a thread with more of its stack left.
    """
    if not _is_batch(fields):
        return None
    try:
        return len(msgspec.json.decode(fields["prompt"], type=list[msgspec.Raw]))
    except UNREADABLE as error:
        raise RequestError(f"prompt cannot be read: {error}", param="prompt") from error


def bootstrap_host(instance: Instance) -> str:
    """Return the instance's host, an IPv6 address in brackets."""
    host = urlsplit(instance.url).hostname or ""
    return url_host(host)


def bootstrap_url(instance: Instance) -> str:
    return f"http://{bootstrap_host(instance)}:{BOOTSTRAP_PORT}"
