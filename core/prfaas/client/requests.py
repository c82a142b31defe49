"""Requests as they are sent: places, body, headers, how long to wait, and whether to send one again.

A request is sent again only where the server said that it did nothing (429, 503), or where no connection came about.
Any other failure may have cost tokens already; the caller decides about it.
"""

import math
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, NamedTuple, TypedDict
from urllib.parse import urlsplit

import httpx
import msgspec

from prfaas.client.errors import BusyError, DeadlinePassedError, error_of
from prfaas.errors import BadInputError, PeerError, PrfaasError, UnreachableError
from prfaas.util import Deadline, backoff_seconds
from prfaas.wire import headers as names
from prfaas.wire.preferences import (
    MAX_DEADLINE_SECONDS,
    MIN_DEADLINE_SECONDS,
    Offload,
    check_datacenters,
    read_offload,
    write_datacenters,
)

RETRIES: Final = 2
FIRST_PAUSE_SECONDS: Final = 0.1
CONNECT_SECONDS: Final = 5.0
GRACE_SECONDS: Final = 2.0
"""How much longer than the deadline the client itself waits, so that the gateway's own error arrives first."""

Prompt = str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]]
Messages = Sequence[Mapping[str, Any]]


class Places:
    """Datacenters to prefer, best first, and to forbid. A name covers all places within it: `us` covers us-east-1.

    Raises RequestError for a name that is malformed, or both preferred and forbidden.
    """

    def __init__(self, prefer: tuple[str, ...] = (), forbid: tuple[str, ...] = ()):
        check_datacenters(prefer, forbid)
        self._prefer = prefer
        self._forbid = forbid

    def prefer(self, *names: str) -> "Places":
        """Return these places with more datacenters to prefer, after the present ones."""
        return Places((*self._prefer, *names), self._forbid)

    def forbid(self, *names: str) -> "Places":
        """Return these places with more datacenters to forbid."""
        return Places(self._prefer, (*self._forbid, *names))

    def __str__(self) -> str:
        return write_datacenters(self._prefer, self._forbid)


class Prefer(Places):
    """Prefer these datacenters, best first."""

    def __init__(self, *names: str):
        super().__init__(prefer=names)


class Forbid(Places):
    """Forbid these datacenters."""

    def __init__(self, *names: str):
        super().__init__(forbid=names)


ANYWHERE: Final = Places()


class Parameters(TypedDict, total=False):
    """A request's fields beside its prompt: the OpenAI API's, and further ones of vLLM's."""

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


class ClientOptions(NamedTuple):
    api_key: str | None = None
    datacenters: Places = ANYWHERE
    offload: Offload = "auto"
    deadline: float | None = None

    def checked(self) -> "ClientOptions":
        """Return these options; raises BadInputError where no request could carry them."""
        read_offload(self.offload)
        if self.deadline is not None and not MIN_DEADLINE_SECONDS <= self.deadline <= MAX_DEADLINE_SECONDS:
            form = f"want {MIN_DEADLINE_SECONDS} to {MAX_DEADLINE_SECONDS}, or None"
            raise BadInputError(f"deadline is {self.deadline} s; {form}")
        if self.api_key is not None and not (self.api_key.isascii() and self.api_key.isprintable()):
            raise BadInputError("api_key must be printable ASCII; is there a line break at its end?")
        return self

    def changed(self, changes: Mapping[str, Any]) -> "ClientOptions":
        """Return these options with some changed; raises BadInputError for unknown or unusable ones."""
        if unknown := changes.keys() - set(self._fields):
            raise BadInputError(f"unknown options {sorted(unknown)}; there are {', '.join(self._fields)}")
        return self._replace(**changes).checked()


class GatewayCall(NamedTuple):
    method: str
    path: str
    body: bytes = b""


LIST_MODELS: Final = GatewayCall("GET", "/v1/models")


def call_completions(model: str, prompt: Prompt, parameters: Mapping[str, Any], *, stream: bool = False) -> GatewayCall:
    """Return the call that continues a prompt; raises BadInputError for what JSON cannot express."""
    return GatewayCall("POST", "/v1/completions", _body({"model": model, "prompt": prompt}, parameters, stream=stream))


def call_chat(model: str, messages: Messages, parameters: Mapping[str, Any], *, stream: bool = False) -> GatewayCall:
    """Return the call that answers a conversation; raises BadInputError for what JSON cannot express."""
    return GatewayCall(
        "POST", "/v1/chat/completions", _body({"model": model, "messages": messages}, parameters, stream=stream)
    )


class RequestAttempt:
    """One request of a client, from its first sending to its last."""

    def __init__(self, call: GatewayCall, options: ClientOptions, http: httpx.Client | httpx.AsyncClient):
        self._call = call
        self._options = options
        self._http = http
        self._deadline = Deadline(math.inf if options.deadline is None else options.deadline)
        self._retries = 0
        self.pause_seconds = 0.0
        """How long to wait before the next sending."""

    def request(self) -> httpx.Request:
        """Return the request to send now; raises DeadlinePassedError."""
        options = self._options
        headers = {"Content-Type": "application/json"}
        if options.api_key is not None:
            headers["Authorization"] = f"Bearer {options.api_key}"
        if places := str(options.datacenters):
            headers[names.DATACENTERS] = places
        if options.offload != "auto":
            headers[names.OFFLOAD] = options.offload
        timeout_seconds = None
        if options.deadline is not None:
            left_seconds = self._deadline.left_seconds
            if left_seconds < 0.001:
                raise DeadlinePassedError(f"no answer within {options.deadline} s")
            headers[names.DEADLINE_SECONDS] = f"{left_seconds:.3f}"
            timeout_seconds = left_seconds + GRACE_SECONDS
        timeout = httpx.Timeout(timeout_seconds, connect=CONNECT_SECONDS)
        method, path, body = self._call
        return self._http.build_request(method, path, content=body, headers=headers, timeout=timeout)

    @contextmanager
    def sending(self) -> Generator[None]:
        """Raise our errors for httpx's. A failed connection that may be tried again only sets `pause_seconds`."""
        try:
            yield
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            unreachable = UnreachableError(f"{self._http.base_url}: {error}")
            self._pause(unreachable, backoff_seconds(self._retries + 1, FIRST_PAUSE_SECONDS, math.inf, jitter=False))
        except httpx.TimeoutException as error:
            raise DeadlinePassedError(f"no answer within {self._options.deadline} s") from error
        except httpx.HTTPError as error:
            raise UnreachableError(f"{self._http.base_url}: {error or type(error).__name__}") from error

    def refused(self, response: httpx.Response, body: bytes) -> None:
        """Set `pause_seconds` after an answer with a status of 400 or more, or raise the error that it is."""
        error = error_of(response.status_code, response.headers, body)
        if not isinstance(error, BusyError):
            raise error
        self._pause(error, error.retry_after_seconds)

    def _pause(self, error: PrfaasError, seconds: float) -> None:
        if self._retries == RETRIES or seconds >= self._deadline.left_seconds:
            raise error
        self._retries += 1
        self.pause_seconds = seconds


@contextmanager
def reading(late: str, broken: type[PeerError], what: str) -> Generator[None]:
    """Raise DeadlinePassedError with the text `late`, or `broken`, for httpx's errors while `what` is read."""
    try:
        yield
    except httpx.TimeoutException as error:
        raise DeadlinePassedError(late) from error
    except httpx.HTTPError as error:
        raise broken(f"{what} broke off: {error or type(error).__name__}") from error


def server_of(base_url: str) -> str:
    """Return a gateway's address without /v1 at its end; raises BadInputError where it is not an address."""
    try:
        parts = urlsplit(base_url)
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_address = False
    if not is_address or not base_url.isprintable():
        raise BadInputError(f"base_url is {base_url!r}; want http://HOST:PORT or https://HOST:PORT")
    return base_url.rstrip("/").removesuffix("/v1")


def _body(fields: Mapping[str, Any], parameters: Mapping[str, Any], *, stream: bool) -> bytes:
    try:
        return msgspec.json.encode({**fields, **parameters, **({"stream": True} if stream else {})})
    except (TypeError, ValueError, OverflowError) as error:
        raise BadInputError(f"the request cannot be written as JSON: {error}") from error
