"""The little of the OpenAI API that the gateway itself speaks: the head of a request, error bodies, the model list.

A request's body is parsed for `model` alone and relayed as the very bytes that came.
"""

import asyncio
import math
import re
import uuid
from collections.abc import Mapping
from typing import Any

import msgspec
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from prfaas.errors import BadInputError, CapacityError, PeerError, RequestError
from prfaas.wire import headers
from prfaas.wire.preferences import Preferences, read_deadline_seconds, read_preferences
from prfaas_gateway.limits import Limits

# What a worker needs of a request stands in its body. An allow-list keeps out hop-by-hop headers, credentials meant for
# the gateway, and x-prfaas-* headers that would let a client choose where its prompt is computed.
FORWARDED_REQUEST_HEADERS = ("Content-Type", "Accept")
HOP_BY_HOP = frozenset(
    {
        "connection",
        "content-length",  # set anew for what is sent
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)
REQUEST_ID_PATTERN = re.compile(r"[A-Za-z0-9._:/+=-]{1,128}")
CODE_DEADLINE = "deadline_exceeded"
CODE_LATE = "slo_exceeded"
# What msgspec raises for bytes that are no JSON: bad syntax, bad UTF-8, nesting that would exhaust the stack.
UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


class _Head(msgspec.Struct):
    model: str


_head_decoder = msgspec.json.Decoder(_Head)


class LimitError(RequestError):
    """A client has used up what they may.

    Args:
        message: which limit, and when to try again.
        kind: what there were too many of, `requests` or `tokens`: the error's type, as OpenAI has it.
        retry_after_seconds: when to try again.

    """

    def __init__(self, message: str, kind: str, retry_after_seconds: float):
        super().__init__(message, status=429, code="rate_limit_exceeded")
        self.kind = kind
        self.retry_after_seconds = retry_after_seconds


class SaturatedError(CapacityError):
    """Every instance that could serve lives and is full."""


class LateError(CapacityError):
    """More waits than the policy's SLO allows.

    Args:
        message: how much.
        retry_after_seconds: when it is expected to be less.

    """

    def __init__(self, message: str, retry_after_seconds: float):
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class DeadlineError(TimeoutError):
    """The request's own deadline has passed."""


class Intake(msgspec.Struct, frozen=True):
    """One request as it came: where to, for which model, its raw body, and the headers that go on to a worker.

    `deadline_seconds` is when it must be over, by the event loop's clock.
    """

    path: str
    model: str
    request_id: str
    body: bytes
    headers: dict[str, str]
    preferences: Preferences
    deadline_seconds: float | None

    def leg_headers(self) -> dict[str, str]:
        """Return the headers of a leg that starts now: with what is left of the time."""
        if self.deadline_seconds is None:
            return self.headers
        left_seconds = max(0.001, self.deadline_seconds - asyncio.get_running_loop().time())
        return {**self.headers, headers.DEADLINE_SECONDS: f"{left_seconds:.3f}"}


async def read_intake(request: web.Request, limits: Limits) -> Intake:
    """Read and check one request.

    Raises:
        DeadlineError: its deadline passed before the body was there.
        RequestError: 413 for a body that is too large, 408 for one that does not arrive, 400 for one that is not a JSON
            object with a model, or for a header that breaks its form.

    """
    deadline_seconds = _read_deadline(request)
    preferences = read_preferences(_only_once(request))
    body = await _read_body(request, limits, deadline_seconds)
    request_id = request.headers.get(headers.REQUEST_ID, "")
    if not REQUEST_ID_PATTERN.fullmatch(request_id):
        request_id = uuid.uuid4().hex
    forwarded = {name: request.headers[name] for name in FORWARDED_REQUEST_HEADERS if name in request.headers}
    forwarded[headers.REQUEST_ID] = request_id
    return Intake(request.path, _read_model(body), request_id, body, forwarded, preferences, deadline_seconds)


def _only_once(request: web.Request) -> Mapping[str, str]:
    """Return the headers, of which those that carry preferences may not come twice: one of them would be ignored."""
    for name in (headers.DATACENTERS, headers.OFFLOAD, headers.DEADLINE_SECONDS):
        if name in request.headers and len(request.headers.getall(name)) > 1:
            raise RequestError(f"the header {name} comes twice; send it once", code="invalid_header", param=name)
    return request.headers


def _read_deadline(request: web.Request) -> float | None:
    """Return when the request must be over, None for whenever it likes."""
    text = request.headers.get(headers.DEADLINE_SECONDS)
    return None if text is None else asyncio.get_running_loop().time() + read_deadline_seconds(text)


async def _read_body(request: web.Request, limits: Limits, deadline_seconds: float | None) -> bytes:
    too_large = RequestError(
        f"the request body exceeds {limits.request_bytes} bytes; send a shorter prompt",
        status=413,
        code="request_too_large",
    )
    if (request.content_length or 0) > limits.request_bytes:
        raise too_large
    latest_seconds = asyncio.get_running_loop().time() + limits.idle_seconds
    try:
        async with asyncio.timeout_at(min(latest_seconds, deadline_seconds or latest_seconds)):
            return await request.read()
    except web.HTTPRequestEntityTooLarge as error:
        raise too_large from error
    except (web.RequestPayloadError, HttpProcessingError) as error:
        raise RequestError(f"the body does not have the encoding or length that its headers say: {error}") from error
    except TimeoutError as error:
        if deadline_seconds is not None and deadline_seconds < latest_seconds:
            raise DeadlineError("the deadline passed before the request's body was there") from error
        message = f"the request body did not arrive within {limits.idle_seconds:g} s"
        raise RequestError(message, status=408, code="request_timeout") from error


def _read_model(body: bytes) -> str:
    try:
        return _head_decoder.decode(body).model
    except msgspec.ValidationError as error:
        raise RequestError(
            f"the request body is not valid: {error}; model names the model, a string", param="model"
        ) from error
    except UNREADABLE as error:
        raise RequestError(f"the request body is not JSON: {error}", code="invalid_json") from error


def relayed_headers(answer: Mapping[str, str], added: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return a worker's response headers without those of its connection with us, and with ours in place of its own."""
    left_out = HOP_BY_HOP.union(added)
    return [(name, value) for name, value in answer.items() if name.lower() not in left_out] + list(added.items())


def error_body(message: str, kind: str, code: str, param: str | None = None) -> bytes:
    """Return an OpenAI-style error as JSON."""
    return msgspec.json.encode({"error": {"message": message, "type": kind, "param": param, "code": code}})


def error_code(body: bytes) -> str:
    """Return `error.code` of an error body, or the empty string where there is none."""
    return _error_field(body, "code")


def error_message(body: bytes) -> str:
    """Return `error.message` of an error body, or the empty string where there is none."""
    return _error_field(body, "message")


def error_response(error: Exception) -> web.Response:
    """Return the response for one of our errors: who can act decides the status."""
    retry_after_seconds = 0.0
    match error:
        case LimitError():
            status, body = 429, error_body(str(error), error.kind, error.code)
            retry_after_seconds = error.retry_after_seconds
        case RequestError():
            status, body = error.status, error_body(str(error), "invalid_request_error", error.code, error.param)
        case BadInputError():
            status, body = 400, error_body(str(error), "invalid_request_error", "invalid_request")
        case SaturatedError():
            status, body = 429, error_body(str(error), "server_error", "saturated")
            retry_after_seconds = 1.0
        case LateError():
            status, body = 429, error_body(str(error), "server_error", CODE_LATE)
            retry_after_seconds = error.retry_after_seconds
        case CapacityError():
            status, body = 503, error_body(str(error), "server_error", headers.CODE_OVERLOADED)
            retry_after_seconds = 1.0
        case DeadlineError():
            status, body = 504, error_body(str(error), "server_error", CODE_DEADLINE)
        case TimeoutError():
            status, body = 504, error_body(str(error), "server_error", "timeout")
        case PeerError():
            status, body = 502, error_body(str(error), "server_error", "bad_gateway")
        case _:
            status, body = (
                500,
                error_body("internal error of the gateway; see its log", "server_error", "internal_error"),
            )
    added = {"Retry-After": str(math.ceil(retry_after_seconds))} if retry_after_seconds else {}
    if status == 401:
        added["WWW-Authenticate"] = "Bearer"
    return web.Response(status=status, body=body, headers=added, content_type="application/json")


def model_card(model: str) -> dict[str, Any]:
    """Return one entry of GET /v1/models."""
    return {"id": model, "object": "model", "created": 0, "owned_by": "prfaas"}


def _error_field(body: bytes, name: str) -> str:
    try:
        return str(msgspec.json.decode(body)["error"][name])
    except (*UNREADABLE, KeyError, TypeError):
        return ""
