"""The common parts of engine protocols: errors of a leg, parallel legs, and bodies with added fields.

Foreign engines need fields of their own in a body. All other values keep the client's text, so that numbers and long
prompts arrive unchanged.
"""

import asyncio
from collections.abc import Mapping
from typing import Any, Final, NamedTuple, Protocol
from urllib.parse import urlsplit

import msgspec

from prfaas.errors import PeerError, UnreachableError
from prfaas.names import BOOTSTRAP_PORT
from prfaas.ports import url_host
from prfaas.routing.facts import LegName, Route
from prfaas.wire.routes import Instance
from prfaas_gateway.request import Fields, GatewayRequest
from prfaas_gateway.upstream import Answer, Upstream

OURS: Final = "x-prfaas-"
_ONE: Final = msgspec.Raw(b"1")


class LegFailedError(PeerError):
    """A leg failed before any byte of the answer was relayed, so the request may be retried at another instance.

    `eject` is False for an instance that is only full. The client gets the worker's error `answer` if no other instance
    can serve.
    """

    def __init__(self, message: str, *, leg: LegName, eject: bool, answer: Answer | None = None):
        super().__init__(message)
        self.leg: LegName = leg
        self.eject = eject
        self.answer = answer


class EngineProtocol(Protocol):
    """A protocol between gateway and workers. It reports which leg failed; `prfaas.routing` decides what to do then."""

    async def open(self, route: Route, request: GatewayRequest) -> Answer:
        """Run all legs of a route and return the client's answer, from its first token on.

        Raises LegFailedError for a failed leg (nothing was sent to the client), TimeoutError for a late first token.
        """
        ...


class Leg(NamedTuple):
    name: LegName
    instance: Instance
    body: bytes
    headers: Mapping[str, str] = {}


def plain_headers(request: GatewayRequest) -> dict[str, str]:
    """Return a request's headers for a foreign engine: with the request's id, without ours."""
    return {name: value for name, value in request.headers.items() if not name.lower().startswith(OURS)}


async def call(upstream: Upstream, request: GatewayRequest, leg: Leg) -> Answer:
    """Run one leg and return its answer, which may be a refusal of the request itself (4xx).

    Raises LegFailedError if the instance cannot be reached or cannot serve (5xx).
    """
    try:
        answer = await upstream.post(leg.instance, request.path, {**plain_headers(request), **leg.headers}, leg.body)
    except UnreachableError as error:
        raise LegFailedError(str(error), leg=leg.name, eject=True) from error
    if answer.status >= 500 and (leg.name == "prefill" or answer.status == 503):
        is_full = answer.status == 503
        answer.close()
        message = f"{leg.instance.name} answered HTTP {answer.status} to its {leg.name} leg"
        raise LegFailedError(message, leg=leg.name, eject=not is_full, answer=answer)
    return answer


async def call_both(upstream: Upstream, request: GatewayRequest, prefill: Leg, decode: Leg) -> Answer:
    """Run two legs at once; return the answer of the decode leg, or a prefill instance's refusal of the request.

    Raises LegFailedError if either fails; the other leg is aborted.
    """
    filling = asyncio.create_task(_to_its_end(upstream, request, prefill))
    decoding = asyncio.create_task(call(upstream, request, decode))
    try:
        await asyncio.wait({filling, decoding}, return_when=asyncio.FIRST_COMPLETED)
        if filling.done() and (refusal := filling.result()) is not None:
            await _drop(decoding, filling)
            return refusal
        return _Tied(await decoding, filling)
    except BaseException:
        await _drop(decoding, filling)
        raise


async def _to_its_end(upstream: Upstream, request: GatewayRequest, leg: Leg) -> Answer | None:
    """Run a prefill leg; return None after success, else its refusal of the request."""
    answer = await call(upstream, request, leg)
    try:
        if answer.body is None:
            while await answer.content.readany():
                pass  # that token is not used
        return answer if answer.status >= 400 else None
    finally:
        answer.close()


async def _drop(decoding: asyncio.Task[Answer], filling: asyncio.Task[Answer | None]) -> None:
    decoding.cancel()
    filling.cancel()
    (answer, _) = await asyncio.gather(decoding, filling, return_exceptions=True)
    if isinstance(answer, Answer):
        answer.close()


class _Tied(Answer):
    """The answer of a decode leg whose prefill leg may still run: closing one cancels the other."""

    def __init__(self, answer: Answer, filling: asyncio.Task[Answer | None]):
        self.status, self.headers, self.body = answer.status, answer.headers, answer.body
        self._answer = answer
        self._response = answer._response  # it replaces the answer
        self._filling = filling
        filling.add_done_callback(self._prefill_ended)

    def close(self) -> None:
        super().close()
        self._filling.cancel()

    def _prefill_ended(self, filling: asyncio.Task[Answer | None]) -> None:
        """Cut the answer off after a failed prefill: the decode leg would wait for its cache for ever."""
        if not filling.cancelled() and (filling.exception() is not None or filling.result() is not None):
            self._answer.close()


def with_fields(fields: Fields, added: Mapping[str, Any]) -> bytes:
    """Return a body of these fields; fields in `added` replace those of the same name."""
    return msgspec.json.encode({**fields, **{name: _raw(value) for name, value in added.items()}})


def for_prefill(fields: Fields, added: Mapping[str, Any]) -> bytes:
    """Return the body of a leg that only prefills: one token and no stream."""
    kept = {name: value for name, value in fields.items() if name not in ("stream_options", "min_tokens")}
    kept |= {"stream": msgspec.Raw(b"false"), "max_tokens": _ONE}
    if "max_completion_tokens" in kept:
        kept["max_completion_tokens"] = _ONE
    return with_fields(kept, added)


def prompts(fields: Fields) -> int | None:
    """Return the number of prompts in a completion's list, None for a single prompt."""
    raw = bytes(fields.get("prompt", msgspec.Raw(b"null"))).lstrip()
    if not raw.startswith(b"["):
        return None
    listed: list[msgspec.Raw] = msgspec.json.decode(raw, type=list[msgspec.Raw])
    return len(listed) if listed and bytes(listed[0])[:1] in (b'"', b"[") else None


def _raw(value: Any) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(value))


def bootstrap_host(instance: Instance) -> str:
    """Return the instance's host, an IPv6 address in brackets."""
    host = urlsplit(instance.url).hostname or ""
    return url_host(host)


def bootstrap_url(instance: Instance) -> str:
    return f"http://{bootstrap_host(instance)}:{BOOTSTRAP_PORT}"
