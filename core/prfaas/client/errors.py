"""The errors of a request, chosen by an answer's status and code.

400, 401, 404, 413      RequestError        the caller has to change something
429, 503                BusyError           later may help; `retry_after_seconds` says when
504, or no answer       DeadlinePassedError
other 5xx               PeerError
no connection           UnreachableError
a stream cut off        BrokenStreamError
other bytes             ProtocolError
"""

from collections.abc import Mapping
from typing import Any, cast

import msgspec

from prfaas.errors import UNREADABLE, CapacityError, PeerError, PrfaasError, RequestError
from prfaas.util import retry_after_seconds


class BusyError(CapacityError):
    """There is no room for the request now, or its API key has used up its limit.

    `code` is rate_limit_exceeded, saturated or overloaded. Try again after `retry_after_seconds`.
    """

    def __init__(self, message: str, code: str, retry_after_seconds: float):
        super().__init__(message)
        self.code = code
        self.retry_after_seconds = retry_after_seconds


class DeadlinePassedError(PeerError):
    """The answer was not whole within the deadline."""


class BrokenStreamError(PeerError):
    """A stream ended before its answer was whole. The chunks until then are valid."""


def error_of(status: int, headers: Mapping[str, str], body: bytes) -> PrfaasError:
    """Return the error that an answer with a status of 400 or more is."""
    error = _read_error(body)
    message = str(error.get("message") or f"HTTP {status}")
    code = str(error.get("code") or "")
    if status in (429, 503):
        return BusyError(message, code, retry_after_seconds(headers.get("retry-after")))
    if status == 504:
        return DeadlinePassedError(message)
    if status >= 500:
        return PeerError(f"HTTP {status}: {message}")
    param = error.get("param")
    return RequestError(message, status=status, code=code or "invalid_request", param=str(param) if param else None)


def error_in_stream(error: object) -> PrfaasError:
    fields = cast(dict[str, Any], error) if isinstance(error, dict) else {}
    message = str(fields.get("message") or "the stream ended with an error")
    is_late = fields.get("code") == "deadline_exceeded"
    return DeadlinePassedError(message) if is_late else BrokenStreamError(message)


def _read_error(body: bytes) -> dict[str, Any]:
    try:
        error = msgspec.json.decode(body)["error"]
    except (*UNREADABLE, KeyError, TypeError):
        return {}
    return cast(dict[str, Any], error) if isinstance(error, dict) else {}
