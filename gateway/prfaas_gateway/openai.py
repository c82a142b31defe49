"""The gateway's own answers in the form of the OpenAI API: errors with their status.

Errors of the Messages API have Anthropic's form, with OpenAI's fields besides.
"""

import math
from collections.abc import Mapping
from typing import Annotated, Any, NamedTuple

import msgspec
from aiohttp import web
from msgspec import Meta

from prfaas import http_server
from prfaas.errors import UNREADABLE, BadInputError, CapacityError, PeerError, RequestError
from prfaas.routing.quarantine import LOSSES
from prfaas.wire import headers

HOP_BY_HOP = frozenset(
    {
        "connection",
        "content-length",  # set again for the relayed body
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)
CODE_DEADLINE = "deadline_exceeded"
MAX_NAME = 100
MESSAGES_PATH = "/v1/messages"
RESPONSES_PATH = "/v1/responses"
DONE = b"data: [DONE]\n\n"
"""The last bytes of a whole stream."""
_Count = Annotated[int, Meta(ge=0, lt=1 << 40)]
_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class _Usage(msgspec.Struct):
    prompt_tokens: _Count | None = None
    completion_tokens: _Count | None = None
    input_tokens: _Count | None = None
    """Its name in the Messages and Responses APIs."""
    output_tokens: _Count | None = None
    """Likewise."""


class _Counted(msgspec.Struct):
    usage: _Usage | None = None


class _CountedEvent(_Counted):
    response: _Counted | None = None
    """The last event of the Responses API has the whole response."""


_counted = msgspec.json.Decoder(_CountedEvent)


class LimitError(RequestError):
    """A client reached a limit. `kind` is `requests` or `tokens`, the error's type as in OpenAI's API."""

    def __init__(self, message: str, kind: str, retry_after_seconds: float):
        super().__init__(message, status=429, code="rate_limit_exceeded")
        self.kind = kind
        self.retry_after_seconds = retry_after_seconds


class SaturatedError(CapacityError):
    """Every living instance that could serve is full."""


class LateError(CapacityError):
    """More requests wait than the policy's SLO allows."""

    status, code = 429, "slo_exceeded"

    def __init__(self, message: str, retry_after_seconds: float):
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class QuarantinedError(CapacityError):
    """The request lost as many connections to engines as it may, or its client's did: they may have killed them."""

    status, code = 503, "request_quarantined"

    def __init__(self, retry_after_seconds: float, *, of_client: bool):
        lost = f"{LOSSES} engines failed or were lost with this request, so no other one gets it: change it, or"
        if of_client:
            lost = "engines failed or were lost with requests of this key again and again, so none gets another one:"
        super().__init__(f"{lost} send it again in {retry_after_seconds:.0f} s")
        self.retry_after_seconds = retry_after_seconds


class DeadlineError(TimeoutError):
    """The request's own deadline has passed."""


def model_not_found(name: str) -> RequestError:
    """Return the error for a model that this gateway does not serve; it repeats the beginning of a long name."""
    text = f"the model {name[:MAX_NAME]!r} is not served here; GET /v1/models lists the served models"
    return RequestError(text, status=404, code="model_not_found", param="model")


def relayed_headers(answer: Mapping[str, str], added: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return a worker's response headers for the client; `added` replace those of the same name."""
    left_out = HOP_BY_HOP.union(added)
    kept = [
        (name, value)
        for name, value in answer.items()
        # Which pages may read an answer, the policy says.
        if (lower := name.lower()) not in left_out and not lower.startswith("access-control-")
    ]
    return kept + list(added.items())


def error_body(message: str, kind: str, code: str, param: str | None = None) -> bytes:
    return msgspec.json.encode(http_server.error_body(message, code=code, param=param, kind=kind))


def error_event(path: str, reason: str, code: str) -> bytes:
    """Return the event that ends a broken stream, in the form of its API."""
    if path.startswith(MESSAGES_PATH):
        return b"event: error\ndata: " + _in_anthropic_form(error_body(reason, "server_error", code), 500) + b"\n\n"
    if path.startswith(RESPONSES_PATH):
        error = {"type": "error", "code": code, "message": reason, "param": None}
        return b"event: error\ndata: " + msgspec.json.encode(error) + b"\n\n"
    return b"data: " + error_body(reason, "server_error", code) + b"\n\n"


def _in_anthropic_form(body: bytes, status: int) -> bytes:
    error = read_error(body) | {"type": _ANTHROPIC_TYPES.get(status, "api_error")}
    return msgspec.json.encode({"type": "error", "error": error})


def read_error(body: bytes) -> dict[str, Any]:
    """Return the `error` of an OpenAI-style error body without what is nested in it, empty if there is none."""
    try:
        error = msgspec.json.decode(body)["error"]
    except (*UNREADABLE, KeyError, TypeError):
        return {}
    if not isinstance(error, dict):
        return {}
    return {name: one for name, one in error.items() if not isinstance(one, (dict, list))}


class UsedTokens(NamedTuple):
    """What a request has used; None: unknown."""

    prompt_tokens: int | None = None
    answer_tokens: int | None = None
    """Of all its answers together."""

    def or_else(self, other: "UsedTokens") -> "UsedTokens":
        """Return these counts, and those of another one where they are unknown."""
        prompt_tokens = other.prompt_tokens if self.prompt_tokens is None else self.prompt_tokens
        return UsedTokens(prompt_tokens, other.answer_tokens if self.answer_tokens is None else self.answer_tokens)


def read_usage(path: str, answer: bytes) -> UsedTokens:
    """Return the usage that a whole answer, or an event, names.

    Only the usage counts. An answer may repeat objects of its client, such as a tool's parameters, with any key.
    """
    try:
        counted = _counted.decode(answer)
    except UNREADABLE:
        return UsedTokens()
    usage = counted.usage or (counted.response and counted.response.usage) or _Usage()
    if path in (MESSAGES_PATH, RESPONSES_PATH):
        return UsedTokens(usage.input_tokens, usage.output_tokens)
    return UsedTokens(usage.prompt_tokens, usage.completion_tokens)


def find_usage(path: str, events: bytes) -> UsedTokens:
    """Return the last counts that the end of a stream names, which begins with a whole line."""
    found = UsedTokens()
    for line in reversed(events.splitlines()):
        if line.startswith(b"data:"):
            found = found.or_else(read_usage(path, line[5:]))
        if None not in found:
            break
    return found


def error_response(error: Exception, path: str = "") -> web.Response:
    """Return the response for one of our errors to a request for `path`; its branch of the tree decides the status."""
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
            # Unlike 503, which says that nothing serves: all is well, and clients back off.
            status, body = 429, error_body(str(error), "server_error", "saturated")
            retry_after_seconds = 1.0
        case LateError() | QuarantinedError():
            status, body = error.status, error_body(str(error), "server_error", error.code)
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
    if path.startswith(MESSAGES_PATH):
        body = _in_anthropic_form(body, status)
    if status == 401:
        added["WWW-Authenticate"] = "Bearer"
    return web.Response(status=status, body=body, headers=added, content_type="application/json")
