"""The little of the OpenAI API that the gateway itself speaks: the head of a request, error bodies, the model list.

A request's body is parsed for `model` alone and relayed as the very bytes that came.
"""

import asyncio
import re
import uuid
from collections.abc import Mapping
from typing import Any

import msgspec
from aiohttp import web

from prfaas.errors import BadInputError, CapacityError, PeerError, RequestError
from prfaas.wire import headers
from prfaas_gateway.limits import Limits

# What a worker needs of a request stands in its body. An allow-list keeps out hop-by-hop headers, credentials meant for
# the gateway, and x-prfaas-* headers that would let a client choose where its prompt is computed.
FORWARDED_REQUEST_HEADERS = ("Content-Type", "Accept", "traceparent", "tracestate")
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
# What msgspec raises for bytes that are no JSON: bad syntax, bad UTF-8, nesting that would exhaust the stack.
UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


class _Head(msgspec.Struct):
    model: str


_head_decoder = msgspec.json.Decoder(_Head)


class Intake(msgspec.Struct, frozen=True):
    """One request as it came: where to, for which model, its raw body, and the headers that go on to a worker."""

    path: str
    model: str
    request_id: str
    body: bytes
    headers: dict[str, str]


async def read_intake(request: web.Request, limits: Limits) -> Intake:
    """Read and check one request.

    Raises:
        RequestError: 413 for a body that is too large, 408 for one that does not arrive, 400 for one that is not a JSON
            object with a model.

    """
    body = await _read_body(request, limits)
    request_id = request.headers.get(headers.REQUEST_ID, "")
    if not REQUEST_ID_PATTERN.fullmatch(request_id):
        request_id = uuid.uuid4().hex
    forwarded = {name: request.headers[name] for name in FORWARDED_REQUEST_HEADERS if name in request.headers}
    forwarded[headers.REQUEST_ID] = request_id
    return Intake(request.path, _read_model(body), request_id, body, forwarded)


async def _read_body(request: web.Request, limits: Limits) -> bytes:
    too_large = RequestError(
        f"the request body exceeds {limits.request_bytes} bytes; send a shorter prompt",
        status=413,
        code="request_too_large",
    )
    if (request.content_length or 0) > limits.request_bytes:
        raise too_large
    try:
        async with asyncio.timeout(limits.idle_seconds):
            return await request.read()
    except web.HTTPRequestEntityTooLarge as error:
        raise too_large from error
    except TimeoutError as error:
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
    try:
        return str(msgspec.json.decode(body)["error"]["code"])
    except (*UNREADABLE, KeyError, TypeError):
        return ""


def error_response(error: Exception) -> web.Response:
    """Return the response for one of our errors: who can act decides the status."""
    match error:
        case RequestError():
            status, body = error.status, error_body(str(error), "invalid_request_error", error.code, error.param)
        case BadInputError():
            status, body = 400, error_body(str(error), "invalid_request_error", "invalid_request")
        case CapacityError():
            status, body = 503, error_body(str(error), "server_error", headers.CODE_OVERLOADED)
        case TimeoutError():
            status, body = 504, error_body(str(error), "server_error", "timeout")
        case PeerError():
            status, body = 502, error_body(str(error), "server_error", "bad_gateway")
        case _:
            status, body = (
                500,
                error_body("internal error of the gateway; see its log", "server_error", "internal_error"),
            )
    retry = {"Retry-After": "1"} if status == 503 else {}
    return web.Response(status=status, body=body, headers=retry, content_type="application/json")


def model_card(model: str) -> dict[str, Any]:
    """Return one entry of GET /v1/models."""
    return {"id": model, "object": "model", "created": 0, "owned_by": "prfaas"}
