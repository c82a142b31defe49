"""Requests as they are sent: body, headers, how long to wait, and whether to send one again. Knows no sockets.

A request is sent again only where the server has said that it did nothing with it (429, 503), or where no connection to
it came about. Whatever else goes wrong may have cost tokens already, and is the caller's to judge.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple, TypedDict
from urllib.parse import urlsplit

import msgspec

from prfaas.client.errors import BusyError, DeadlinePassedError, error_of
from prfaas.client.places import Places
from prfaas.errors import BadInputError, PrfaasError, UnreachableError
from prfaas.wire import headers as names
from prfaas.wire.preferences import MAX_DEADLINE_SECONDS, MIN_DEADLINE_SECONDS, Offload, read_offload

RETRIES: Final = 2
CONNECT_SECONDS: Final = 5.0
GRACE_SECONDS: Final = 2.0
"""How much longer than the deadline the client itself waits: the gateway's own word for it is the better one."""
ANYWHERE: Final = Places()

Prompt = str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]]
Messages = Sequence[Mapping[str, Any]]


class Parameters(TypedDict, total=False):
    """What a request may say beside its prompt; see the OpenAI API, and vLLM's for those that it lacks."""

    max_tokens: int
    max_completion_tokens: int
    min_tokens: int
    n: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int
    stop: str | list[str]
    stop_token_ids: list[int]
    ignore_eos: bool
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: dict[str, float]
    logprobs: bool | int
    top_logprobs: int
    echo: bool
    response_format: dict[str, Any]
    tools: list[dict[str, Any]]
    tool_choice: str | dict[str, Any]
    stream_options: dict[str, Any]
    cache_salt: str


class Options(NamedTuple):
    """What holds for every request of a client."""

    api_key: str | None = None
    datacenters: Places = ANYWHERE
    offload: Offload = "auto"
    deadline: float | None = None

    def checked(self) -> "Options":
        """Return these options; raises BadInputError for what no request could carry."""
        read_offload(self.offload)
        if self.deadline is not None and not MIN_DEADLINE_SECONDS <= self.deadline <= MAX_DEADLINE_SECONDS:
            form = f"want {MIN_DEADLINE_SECONDS} to {MAX_DEADLINE_SECONDS}, or None"
            raise BadInputError(f"deadline is {self.deadline} s; {form}")
        if self.api_key is not None and not (self.api_key.isascii() and self.api_key.isprintable()):
            raise BadInputError("api_key must be printable ASCII; is there a line break at its end?")
        return self

    def changed(self, changes: Mapping[str, Any]) -> "Options":
        """Return these options with some changed; raises BadInputError for unknown or unusable ones."""
        if unknown := changes.keys() - set(self._fields):
            raise BadInputError(f"unknown options {sorted(unknown)}; there are {', '.join(self._fields)}")
        return self._replace(**changes).checked()


class Attempt:
    """One request from its first sending to its last.

    Args:
        options: of the client.
        now_seconds: by a monotonic clock, as everywhere here.

    """

    def __init__(self, options: Options, now_seconds: float):
        self._options = options
        self._ends_seconds = None if options.deadline is None else now_seconds + options.deadline
        self._retries = 0

    def headers(self, now_seconds: float) -> dict[str, str]:
        """Return the headers of a sending that begins now; raises DeadlinePassedError."""
        options = self._options
        found = {"Content-Type": "application/json"}
        if options.api_key is not None:
            found["Authorization"] = f"Bearer {options.api_key}"
        if places := str(options.datacenters):
            found[names.DATACENTERS] = places
        if options.offload != "auto":
            found[names.OFFLOAD] = options.offload
        left_seconds = self.left_seconds(now_seconds)
        if left_seconds is not None:
            found[names.DEADLINE_SECONDS] = f"{left_seconds:.3f}"
        return found

    def left_seconds(self, now_seconds: float) -> float | None:
        """Return what is left of the deadline, None without one; raises DeadlinePassedError."""
        if self._ends_seconds is None:
            return None
        left_seconds = self._ends_seconds - now_seconds
        if left_seconds < 0.001:
            raise DeadlinePassedError(f"no answer within {self._options.deadline} s")
        return left_seconds

    def after_no_connection(self, reason: str, now_seconds: float) -> float:
        """Return how long to wait before the next sending; raises UnreachableError where there is none."""
        return self._pause(UnreachableError(reason), 0.1 * 2**self._retries, now_seconds)

    def after_answer(self, status: int, headers: Mapping[str, str], body: bytes, now_seconds: float) -> float:
        """Return how long to wait after an answer with a status of 400 or more, or raise the error that it is."""
        error = error_of(status, headers, body)
        if not isinstance(error, BusyError):
            raise error
        return self._pause(error, error.retry_after_seconds, now_seconds)

    def _pause(self, error: PrfaasError, seconds: float, now_seconds: float) -> float:
        is_too_late = self._ends_seconds is not None and now_seconds + seconds >= self._ends_seconds
        if self._retries == RETRIES or is_too_late:
            raise error
        self._retries += 1
        return seconds


def body_of(fields: Mapping[str, Any], parameters: Mapping[str, Any], *, stream: bool) -> bytes:
    """Return a request's body; raises BadInputError for what JSON cannot say."""
    try:
        return msgspec.json.encode({**fields, **parameters, **({"stream": True} if stream else {})})
    except (TypeError, ValueError, OverflowError) as error:
        raise BadInputError(f"the request cannot be written as JSON: {error}") from error


def server_of(base_url: str) -> str:
    """Return a gateway's address without /v1 at its end; raises BadInputError for what is no address."""
    try:
        parts = urlsplit(base_url)
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_address = False
    if not is_address or not base_url.isprintable():
        raise BadInputError(f"base_url is {base_url!r}; want http://HOST:PORT or https://HOST:PORT")
    return base_url.rstrip("/").removesuffix("/v1")
