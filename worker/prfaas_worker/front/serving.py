"""Shared by all handlers: the served model, the state of the front, and the reading and checks of requests.

Reading a request must not hold up streams. So a body is bounded in bytes and a long one is read in a thread. The
tokenizer libraries release the interpreter's lock; JSON decoding and lists of token ids do not. A body may therefore
have no more than a full context can need, and holds the lock for milliseconds.
"""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any, Final, TypeVar

import msgspec
from aiohttp import web

from prfaas.bounds.bodies import BodyPlace, HeldBytes
from prfaas.errors import CapacityError, RequestError
from prfaas.http_server import bounds_within, client_of
from prfaas.memory import MAX_BODY_BYTES, worker_budgets
from prfaas.telemetry.tracing import OFF, Tracing
from prfaas.wire import headers
from prfaas_transfer.credentials import PeerCredentials
from prfaas_worker.front.auth import COUNTED_AS
from prfaas_worker.front.engine_client import EngineClient
from prfaas_worker.front.metrics import WorkerMetrics
from prfaas_worker.front.openai_bodies import MAX_NAME
from prfaas_worker.front.spans import TransferSpans
from prfaas_worker.options import WAITING_PER_RUNNING, Options
from prfaas_worker.tokenizer import Tokenizer

READERS: Final = 2  # Threads that read requests: the engine computes on the same cores.
LONG_BYTES: Final = 256 << 10
"""Longer bodies, whose tokens take a tenth of a second or more, wait for each other and for no other request."""
INLINE_BYTES: Final = 2048  # Bodies up to this length are read at once: tokenising takes a millisecond at most.
BODY_SECONDS: Final = 60.0  # In which a body has to arrive.
BYTES_PER_TOKEN: Final = 16
"""A token's bytes in a body: text has 3 to 6, escaped characters and long runs of spaces up to 12."""
BYTES_BESIDE: Final = 1 << 20  # A body's other bytes: roles, parameters, and so on.

Read = TypeVar("Read")


class ServedModel(msgspec.Struct, frozen=True, kw_only=True):
    """The served model: the names and bounds that requests are checked against."""

    model_name: str
    fingerprint: str
    vocab_size: int
    max_context: int
    max_choices: int

    @property
    def max_prompts(self) -> int:
        """Prompts of one request: all of them have to find a place, be it one of those that wait."""
        return WAITING_PER_RUNNING * self.max_choices

    @property
    def max_body_bytes(self) -> int:
        return min(BYTES_BESIDE + BYTES_PER_TOKEN * self.max_context, MAX_BODY_BYTES)


class FrontState:
    """State of the front while it serves. `served` and `tokenizer` exist once the engine has loaded the model.
    `limit_bytes` is that of the container's memory, None without one."""

    def __init__(
        self,
        options: Options,
        engine: EngineClient,
        tracing: Tracing = OFF,
        credentials: PeerCredentials | None = None,
        limit_bytes: int | None = None,
    ):
        self.options = options
        self.engine = engine
        self.tracing = tracing
        self.credentials = credentials  # Present if the API port uses TLS.
        self.metrics = WorkerMetrics(options.max_running, credentials)
        engine.listeners.append(self.metrics)
        if tracing.is_on:
            engine.listeners.append(TransferSpans(tracing))
        budgets = worker_budgets(limit_bytes)
        # One caller may have half: a buyer, or without TLS an address whose bodies still arrive.
        self.bodies = HeldBytes(budgets.bodies_bytes)
        self.connections = bounds_within(budgets.heads_bytes)
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="reader")
        self._long_reader = ThreadPoolExecutor(1, thread_name_prefix="long-reader")
        self.draining = False
        self._model: tuple[ServedModel, Tokenizer] | None = None

    def reader(self, size: int) -> Executor:
        return self._readers if size <= LONG_BYTES else self._long_reader

    def close(self) -> None:
        """Drop bodies that wait to be read: they would delay the process's end."""
        for reader in (self._readers, self._long_reader):
            reader.shutdown(wait=False, cancel_futures=True)

    def loaded(self, served: ServedModel, tokenizer: Tokenizer) -> None:
        self._model = served, tokenizer

    @property
    def ready(self) -> bool:
        return self._model is not None and not self.draining

    @property
    def served(self) -> ServedModel:
        return self.require_loaded()[0]

    @property
    def tokenizer(self) -> Tokenizer:
        return self.require_loaded()[1]

    def require_open(self) -> None:
        if self.draining:
            raise CapacityError("this instance is shutting down; send the request to another one")

    async def idle(self) -> None:
        """Wait until no request runs and no prefill is undelivered."""
        while True:
            stats = await self.engine.stats()
            if not (self.engine.open_calls or stats.prefills_running or stats.prefills_waiting):
                return
            await asyncio.sleep(0.05)

    def require_loaded(self) -> tuple[ServedModel, Tokenizer]:
        if self._model is None:
            raise CapacityError("the model is still loading; try again in a moment")
        return self._model


STATE: Final = web.AppKey("state", FrontState)


def require(held: bool, param: str, rule: str) -> None:
    """Raise a RequestError about `param` and its rule, unless `held`."""
    if not held:
        raise RequestError(f"{param} {rule}", param=param)


def unsupported(param: str, message: str) -> RequestError:
    """Return the error for a parameter that is not served."""
    return RequestError(message, code="unsupported_parameter", param=param)


def require_model(model: str, served: ServedModel) -> None:
    if model == served.model_name:
        return
    if model.startswith(f"{served.model_name}:"):
        raise unsupported("model", f"model {model[:MAX_NAME]!r} names a LoRA adapter, and adapters are not served here")
    raise RequestError(
        f"model {model[:MAX_NAME]!r} is not served here; this instance serves {served.model_name!r}",
        status=404,
        code="model_not_found",
        param="model",
    )


def require_room(token_ids: Sequence[int], served: ServedModel) -> int:
    """Return the number of tokens that may follow a prompt. Raises RequestError if it is empty or too long."""
    require(bool(token_ids), "prompt", "must have at least one token")
    room = served.max_context - len(token_ids)
    if room < 1:
        raise RequestError(
            f"the prompt has {len(token_ids)} tokens, the context {served.max_context} and one token must be free; "
            "shorten the prompt",
            code="context_length_exceeded",
            param="prompt",
        )
    return room


def require_tokens(token_ids: list[Any], served: ServedModel, param: str = "prompt") -> list[int]:
    """Return a list of this model's token ids. Raises RequestError if an entry is not one."""
    size = served.vocab_size
    if token_ids and not (set(map(type, token_ids)) == {int} and min(token_ids) >= 0 and max(token_ids) < size):
        wrong = next(entry for entry in token_ids if type(entry) is not int or not 0 <= entry < size)
        raise RequestError(f"{param} holds {repr(wrong)[:MAX_NAME]}: want token ids of 0 to {size - 1}", param=param)
    return token_ids


def read_places(request: web.Request) -> tuple[str, ...] | None:
    """Return the other clusters whose cached bytes a request may use; None if it may use all. Inside TLS a caller that
    does not say it, such as an old gateway, may have forbidden any of them."""
    places = request.headers.get(headers.PLACES)
    if places is None:
        return None if request.app[STATE].credentials is None else ()
    return tuple(places.split())


async def read_request(request: web.Request, read: Callable[[bytes, ServedModel, Tokenizer], Read]) -> tuple[int, Read]:
    """Return the length of a request's body, and the result of `read`. Raises CapacityError while the model loads or
    too much arrives at once, of this caller or of all; RequestError if it is too long, or late."""
    state = request.app[STATE]
    name, address = request.get(COUNTED_AS, ""), ""
    if state.credentials is None and request.transport is not None:
        address = client_of(request.transport)
    with state.bodies.place(name, address) as place:
        body = await _read_body(request, state.served, place)
        return len(body), await in_thread(state, read, body)


async def _read_body(request: web.Request, served: ServedModel, place: BodyPlace) -> bytes:
    most = served.max_body_bytes
    if (length := request.content_length) is not None and length > most:
        raise _too_long(f"{length} bytes", served)
    parts: list[bytes] = []
    try:
        async with place.arriving(asyncio.get_running_loop().time() + BODY_SECONDS):
            async for part in request.content.iter_any():
                place.take(len(part))
                parts.append(part)
                if place.taken_bytes > most:
                    raise _too_long(f"more than {most} bytes", served)
                await place.turn()
    except TimeoutError as error:
        message = f"the request body did not arrive within {BODY_SECONDS:g} s"
        raise RequestError(message, status=408, code="request_timeout") from error
    return b"".join(parts)


async def in_thread(state: FrontState, read: Callable[[bytes, ServedModel, Tokenizer], Read], body: bytes) -> Read:
    """Return the result of `read`, in a thread if the body is long. Raises CapacityError while the model loads.

    A caller that leaves while a thread reads is cancelled at the next wait after it. By then the engine has its
    request, and tells the source of its leg that nobody wants the cache, which would be kept for a lease.
    """
    served, tokenizer = state.served, state.tokenizer
    if len(body) <= INLINE_BYTES:
        return read(body, served, tokenizer)
    reading = state.reader(len(body)).submit(read, body, served, tokenizer)
    try:
        return await asyncio.shield(asyncio.wrap_future(reading))
    except asyncio.CancelledError:
        if reading.cancel():  # no thread works for who has left before its turn
            raise
        try:
            return await asyncio.wrap_future(reading)
        finally:
            if (task := asyncio.current_task()) is not None:
                task.cancel()


def _too_long(size: str, served: ServedModel) -> RequestError:
    return RequestError(
        f"the body has {size}; with a context of {served.max_context} tokens at most {served.max_body_bytes} are read: "
        "shorten it, or send several requests",
        status=413,
        code="request_too_large",
    )
