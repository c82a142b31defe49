"""Token ids of long texts and chats, by an engine's own `/tokenize`.

Cache events of vLLM and SGLang name blocks of token ids. So a text can be matched with them only by its token ids, and
those only its engine knows: its tokenizer, its chat template, its settings. An instance is asked, and the ids are kept.
They serve for matching alone; the engine gets the body as the client wrote it.

A request waits for an answer for a moment that is short beside its prefill. A late answer is kept for later requests.
The next turn of a chat begins as its last turn did. If that is most of it, the known ids are enough and nothing waits:
what is new cannot be cached. An engine that fails is left alone for a while; the gateway's own record remains.
"""

import asyncio
import logging
import struct
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import msgspec
import xxhash
from prometheus_client import Counter

from prfaas.errors import UNREADABLE, PeerError, UnreachableError
from prfaas.kvindex.bytes import ByteChain
from prfaas.kvindex.canonical import TOKEN_BYTES
from prfaas.names import HUB
from prfaas.wire.routes import Instance
from prfaas_gateway.engines.shared import plain_headers, with_fields
from prfaas_gateway.request import Fields, GatewayRequest
from prfaas_gateway.upstream import Upstream

log = logging.getLogger(__name__)

MIN_TEXT_BYTES: Final = 4096
"""About a thousand tokens. Shorter prompts are not worth a question."""
CALL_SECONDS: Final = 5.0
REST_SECONDS: Final = 30.0
"""For how long an instance that failed is not asked."""
MAX_CALLS: Final = 8
MAX_KEPT_BYTES: Final = 32 << 20
"""Eight million token ids."""
ENOUGH: Final = 0.9
"""The share of a prompt's bytes whose known token ids are enough."""
_BASE_SECONDS, _SECONDS_A_BYTE, _MAX_WAIT_SECONDS = 0.05, 0.25e-6, 0.5
# A field that changes the prompt in a way that the question cannot say. Absent or null, it changes nothing.
_UNASKABLE: Final = ("truncate_prompt_tokens", "prompt_embeds")
_ASKED_OF_CHATS: Final = ("messages", "tools", "add_generation_prompt", "continue_final_message", "add_special_tokens")
_NULL: Final = msgspec.Raw(b"null")


class PromptTokens(NamedTuple):
    """Token ids of a prompt as 32-bit integers, little-endian."""

    data: bytes
    share: float = 1.0
    """Of the prompt's bytes that they stand for, from its beginning."""

    @property
    def total_tokens(self) -> int:
        """The length of the whole prompt; an estimate if these are the ids of a beginning."""
        return int(len(self.data) // TOKEN_BYTES / self.share)


class _Tokenized(msgspec.Struct):
    tokens: list[int]


class _Kept(NamedTuple):
    data: bytes
    end: int
    """The hash of the prompt's last whole byte block."""


_tokenized = msgspec.json.Decoder(_Tokenized)


def wait_seconds(text_bytes: int) -> float:
    """Return how long a prompt of this length may wait for its token ids."""
    return min(_BASE_SECONDS + _SECONDS_A_BYTE * text_bytes, _MAX_WAIT_SECONDS)


def question_of(path: str, fields: Fields, body: dict[str, Any]) -> bytes | None:
    """Return the body of the question for a prompt's token ids; None if an engine could not answer exactly.

    `body` has the decoded fields that canonical bytes depend on.
    """
    if any(bytes(fields.get(name, _NULL)) != b"null" for name in _UNASKABLE):
        return None
    wanted = {"model": fields["model"]}
    if path == "/v1/completions":
        if not isinstance(body.get("prompt"), str):
            return None
        names = ("prompt", "add_special_tokens")
        return with_fields(wanted | {name: fields[name] for name in names if name in fields}, {})
    if path != "/v1/chat/completions" or not _is_text(body.get("messages")):
        return None
    wanted |= {name: fields[name] for name in _ASKED_OF_CHATS if name in fields}
    return with_fields(wanted, {"chat_template_kwargs": _template_arguments(body)})


def _template_arguments(body: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of the chat template as vLLM makes them of a chat."""
    template_args = body.get("chat_template_kwargs") or {}
    fields = {name: body[name] for name in ("documents", "reasoning_effort") if body.get(name) is not None}
    if "reasoning_effort" in fields and "enable_thinking" not in template_args:
        fields["enable_thinking"] = fields["reasoning_effort"] != "none"
    return {**template_args, **fields}


def _is_text(messages: Any) -> bool:
    """Return whether no message has an image or another medium."""
    contents = [one.get("content") for one in messages or () if isinstance(one, dict)]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return all(isinstance(part, dict) and part.get("type") == "text" for part in parts)


class EngineTokenizer:
    """Asks engines for token ids, and keeps the answers."""

    def __init__(self, upstream: Upstream, answers: Counter):
        self._upstream = upstream
        self._answers = answers
        self._kept: OrderedDict[bytes, _Kept] = OrderedDict()
        self._kept_bytes = 0
        self._by_end: dict[int, bytes] = {}
        self._calls: dict[bytes, asyncio.Task[bytes | None]] = {}
        self._resting_until_seconds: dict[str, float] = {}

    def close(self) -> None:
        for call in self._calls.values():
            call.cancel()

    async def tokens_of(
        self, request: GatewayRequest, body: dict[str, Any], chain: ByteChain, instances: Sequence[Instance]
    ) -> PromptTokens | None:
        """Return the token ids of a request's prompt, or of its beginning; None if nothing is known in time.

        `instances` are those to ask, the best one first.
        """
        if len(chain.data) < MIN_TEXT_BYTES:
            return None
        question = question_of(request.path, request.every_field, body)
        if question is None:
            return None
        # With the salt: a quick answer would show one client that another has sent the prompt.
        key = xxhash.xxh3_128_digest(question + (body.get("cache_salt") or "").encode())
        if kept := self._kept.get(key):
            self._kept.move_to_end(key)
            return self._count("kept", PromptTokens(kept.data))
        beginning = self._beginning(chain)
        call = self._calls.get(key) or self._call(key, question, request, chain, instances)
        if call is not None and (beginning is None or beginning.share < ENOUGH):
            # `wait_for` would cancel a late call; this leaves it, and its answer is kept.
            await asyncio.wait({call}, timeout=wait_seconds(len(chain.data)))
            if call.done() and (data := call.result()) is not None:
                return self._count("asked", PromptTokens(data))
        if beginning is not None:
            return self._count("beginning", beginning)
        return self._count("late" if call is not None and not call.done() else "none", None)

    def _count(self, answer: str, tokens: PromptTokens | None) -> PromptTokens | None:
        self._answers.labels(answer).inc()
        return tokens

    def _beginning(self, chain: ByteChain) -> PromptTokens | None:
        """Return the token ids of the longest known prompt that this one continues."""
        if not self._by_end:
            return None
        hashes = chain.all()
        for number in range(len(hashes) - 1, -1, -1):
            key = self._by_end.get(hashes[number])
            if key is not None:
                return PromptTokens(self._kept[key].data, (number + 1) / len(hashes))
        return None

    def _call(
        self, key: bytes, question: bytes, request: GatewayRequest, chain: ByteChain, instances: Sequence[Instance]
    ) -> asyncio.Task[bytes | None] | None:
        """Begin to ask the first instance that may be asked; None if there is none, or too many calls are open."""
        now_seconds = asyncio.get_running_loop().time()
        able = [one for one in instances if self._resting_until_seconds.get(one.url, 0.0) <= now_seconds]
        if not able or len(self._calls) >= MAX_CALLS:
            return None
        sent = {**plain_headers(request), "Content-Type": "application/json"}
        call = asyncio.create_task(self._ask(able[0], question, sent))
        self._calls[key] = call
        end = chain[len(chain) - 1]
        call.add_done_callback(lambda done: self._keep(key, done, end))
        return call

    async def _ask(self, instance: Instance, question: bytes, sent: dict[str, str]) -> bytes | None:
        try:
            async with asyncio.timeout(CALL_SECONDS):
                answer = await self._upstream.post(instance, "/tokenize", sent, question)
            answer.close()
            if answer.status == 400:
                return None  # the request is at fault, and the engine will say so
            if answer.status == 200 and answer.body is None and "Content-Length" in answer.headers:
                return None  # a prompt of more ids than are read here
            if answer.status != 200 or answer.body is None:
                raise UnreachableError(f"HTTP {answer.status}, or too long")
            tokens = _tokenized.decode(answer.body).tokens
            return struct.pack(f"<{len(tokens)}I", *tokens)
        except (PeerError, TimeoutError, struct.error, *UNREADABLE) as error:
            log.info("instance %s gives no token ids: %s", instance.name, error)
            now_seconds = asyncio.get_running_loop().time()
            resting = {url: until for url, until in self._resting_until_seconds.items() if until > now_seconds}
            self._resting_until_seconds = {**resting, instance.url: now_seconds + REST_SECONDS}
            return None

    def _keep(self, key: bytes, call: asyncio.Task[bytes | None], end: int) -> None:
        del self._calls[key]
        data = None if call.cancelled() else call.result()
        if data is None:
            return
        self._kept[key] = _Kept(data, end)
        self._by_end[end] = key
        self._kept_bytes += len(data)
        while self._kept_bytes > MAX_KEPT_BYTES:
            old_key, old = self._kept.popitem(last=False)
            self._kept_bytes -= len(old.data)
            if self._by_end.get(old.end) == old_key:
                del self._by_end[old.end]


def may_tokenize(instance: Instance) -> bool:
    """Return whether an instance may get any prompt: those of the hub may, another place may be forbidden to one."""
    return instance.record.tokenizes and instance.cluster == HUB
