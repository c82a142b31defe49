"""The longest context of the served model, as instances tell it in their model lists (`max_model_len`).

Clients size their prompts by it. TensorRT-LLM and Dynamo do not tell it.
"""

import asyncio
from typing import Final

import msgspec

from prfaas.errors import UNREADABLE, PrfaasError
from prfaas.wire.routes import Instance
from prfaas_gateway.state import GatewayState
from prfaas_gateway.upstream import Upstream

ANSWER_SECONDS: Final = 5.0
LIST_SECONDS: Final = 2.0
"""For how long a client's model list waits for the instances, while nothing is known."""
ANSWER_BYTES: Final = 1 << 20
KNOWN_SECONDS: Final = 60.0
RETRY_SECONDS: Final = 5.0


class _Card(msgspec.Struct):
    id: str
    max_model_len: int | None = None


class _Cards(msgspec.Struct):
    data: list[_Card]


async def read_context(upstream: Upstream, instance: Instance, model: str) -> int | None:
    """Return the longest prompt and answer of a model at an instance; None if it does not tell.

    Raises UnreachableError, or TimeoutError after ANSWER_SECONDS.
    """
    body = b""
    async with asyncio.timeout(ANSWER_SECONDS), upstream.reading(instance, "/v1/models") as response:
        while (piece := await response.content.readany()) and len(body) < ANSWER_BYTES:
            body += piece
    try:
        cards = msgspec.json.decode(body, type=_Cards).data
    except UNREADABLE:
        return None
    told = (one.max_model_len for one in cards if one.id == model)
    return next((tokens for tokens in told if tokens and tokens > 0), None)


class ModelContext:
    """The longest context that every decode instance takes, as they told it last."""

    def __init__(self, state: GatewayState, upstream: Upstream):
        self._state = state
        self._upstream = upstream
        self._model = ""
        self._tokens: int | None = None
        self._due_seconds = 0.0
        self._asking: asyncio.Task[None] | None = None

    async def tokens(self, model: str) -> int | None:
        """Return the longest context of the table's model; None if no instance has told it.

        A number that is known comes at once, and is renewed behind that.
        """
        if model != self._model:
            self.close()
            self._model, self._tokens, self._due_seconds = model, None, self._state.clock()
        is_asking = self._asking is not None and not self._asking.done()
        if not is_asking and self._state.clock() >= self._due_seconds:
            self._asking = asyncio.create_task(self._ask(model))
        if self._tokens is None and self._asking is not None:
            await asyncio.wait({self._asking})  # a caller that leaves does not end it
        return self._tokens

    def close(self) -> None:
        """Ask no more for the present model."""
        if self._asking is not None:
            self._asking.cancel()
            self._asking = None

    async def _ask(self, model: str) -> None:
        """Ask all living decode instances, at once."""
        living = (one for one in self._state.decode_instances() if not self._state.is_ejected(one.name))
        told = await asyncio.gather(*(self._told(one, model) for one in living))
        least = min(filter(None, told), default=None)
        self._tokens = least or self._tokens
        self._due_seconds = self._state.clock() + (KNOWN_SECONDS if least else RETRY_SECONDS)

    async def _told(self, instance: Instance, model: str) -> int | None:
        try:
            async with asyncio.timeout(LIST_SECONDS):
                return await read_context(self._upstream, instance, model)
        except (PrfaasError, TimeoutError):
            return None
