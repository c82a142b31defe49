"""POST /tokenize and /detokenize, in vLLM's shapes: what the model reads, for those who count or cache tokens."""

from collections.abc import Callable
from typing import Any

import msgspec
from aiohttp import web

from prfaas.errors import RequestError
from prfaas_worker.front.bodies import Conversed, read_body
from prfaas_worker.front.checks import Served, require_model, require_tokens
from prfaas_worker.front.openai import conversation_tokens
from prfaas_worker.front.reading import read_request
from prfaas_worker.tokenizer import Tokenizer


class TokenizeBody(msgspec.Struct, frozen=True, kw_only=True):
    """POST /tokenize, but for the conversation that may stand in a prompt's place. A model may be left out."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Any] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(msgspec.Struct, frozen=True, kw_only=True):
    """POST /detokenize."""

    tokens: list[int]
    model: str | None = None


async def tokenize(request: web.Request) -> web.Response:
    """Answer with the token ids of a prompt or a conversation."""
    return await _answer(request, _tokenized)


async def detokenize(request: web.Request) -> web.Response:
    """Answer with the text of token ids, special tokens written out."""
    return await _answer(request, _detokenized)


async def _answer(request: web.Request, make: Callable[[bytes, Served, Tokenizer], bytes]) -> web.Response:
    _, answer = await read_request(request, make)
    return web.json_response(body=answer)


def _tokenized(body: bytes, served: Served, tokenizer: Tokenizer) -> bytes:
    asked = read_body(body, TokenizeBody)
    require_model(asked.model or served.model_name, served)
    if (asked.prompt is None) == (asked.messages is None):
        raise RequestError("give either prompt or messages", param="prompt")
    if asked.prompt is not None:
        tokens = tokenizer.encode(asked.prompt, framed=asked.add_special_tokens is not False)
    else:
        tokens = conversation_tokens(read_body(body, Conversed), tokenizer)
    answer: dict[str, Any] = {"count": len(tokens), "max_model_len": served.max_context, "tokens": tokens}
    if asked.return_token_strs:
        answer["token_strs"] = [tokenizer.decode([token]) for token in tokens]
    return msgspec.json.encode(answer)


def _detokenized(body: bytes, served: Served, tokenizer: Tokenizer) -> bytes:
    asked = read_body(body, DetokenizeBody)
    require_model(asked.model or served.model_name, served)
    return msgspec.json.encode({"prompt": tokenizer.decode(require_tokens(asked.tokens, served, "tokens"))})
