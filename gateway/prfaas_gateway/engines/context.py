"""The longest context of the served model, as an instance tells it in its model list (`max_model_len`).

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
"""For how long a client's model list waits for an instance."""
ANSWER_BYTES: Final = 1 << 20
KNOWN_SECONDS: Final = 60.0
RETRY_SECONDS: Final = 5.0
ASKED: Final = 2
"""Instances to ask in turn."""


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
    return next((one.max_model_len for one in cards if one.id == model and one.max_model_len), None)


class ModelContext:
    """The longest context at the decode instances, as one of them told it last."""

    def __init__(self, state: GatewayState, upstream: Upstream):
        self._state = state
        self._upstream = upstream
        self._lock = asyncio.Lock()
        self._model = ""
        self._tokens: int | None = None
        self._due_seconds = 0.0

    async def tokens(self, model: str) -> int | None:
        """Return the longest context of the table's model; None if no instance has told it."""
        async with self._lock:
            now_seconds = self._state.clock()
            if model != self._model:
                self._model, self._tokens, self._due_seconds = model, None, now_seconds
            if now_seconds >= self._due_seconds:
                found = await self._ask(model)
                self._tokens = found or self._tokens
                self._due_seconds = self._state.clock() + (KNOWN_SECONDS if found else RETRY_SECONDS)
            return self._tokens

    async def _ask(self, model: str) -> int | None:
        instances = [one for one in self._state.decode_instances() if not self._state.is_ejected(one.name)]
        for one in instances[:ASKED]:
            try:
                async with asyncio.timeout(LIST_SECONDS):
                    if found := await read_context(self._upstream, one, model):
                        return found
            except (PrfaasError, TimeoutError):
                continue
        return None
