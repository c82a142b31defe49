"""POST /v1/completions and /v1/chat/completions: one request from its body to its last byte.

Nothing is sent before the first token exists: until then whatever fails is an HTTP status, with which the gateway can
try elsewhere. A client that goes away cancels the handler, which ends the call in the engine, and there the prefill at
the other instance.
"""

import time
from collections.abc import AsyncIterator
from typing import NamedTuple
from urllib.parse import urlsplit
from uuid import uuid4

import msgspec
from aiohttp import web

from prfaas.errors import InternalError, RequestError
from prfaas.wire import headers
from prfaas.wire.engine import Cancel, Generate, Started, TokenLogprob, Tokens
from prfaas_worker.front.answers import Answers, error_body, usage_body
from prfaas_worker.front.engine_client import Call, EngineError
from prfaas_worker.front.openai import Job, chat_job, completion_job
from prfaas_worker.front.serving import SERVING, Serving
from prfaas_worker.front.text import TextStream

MAX_REQUEST_ID = 128


class Piece(NamedTuple):
    """New text of one choice; `reason` is None until its last piece."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprob]
    reason: str | None


class Generation:
    """One call to the engine, as text. `started` and `completion_tokens` are filled while `pieces` is consumed."""

    def __init__(self, call: Call, job: Job, serving: Serving):
        self._call = call
        self._serving = serving
        self._texts = {index: TextStream(serving.tokenizer, job.stop) for index in range(job.choices)}
        self.completion_tokens = 0

    async def start(self) -> Started:
        """Wait until the first token exists.

        Raises:
            EngineError: it will not.

        """
        answer = await self._call.next()
        if not isinstance(answer, Started):
            raise InternalError(f"the engine began an answer with {type(answer).__name__}")
        return answer

    async def pieces(self) -> AsyncIterator[Piece]:
        """Yield text as it becomes certain, until every choice has ended."""
        while self._texts:
            answer = await self._call.next()
            if isinstance(answer, Tokens) and answer.choice in self._texts:
                yield self._piece(answer)

    def _piece(self, tokens: Tokens) -> Piece:
        stream = self._texts[tokens.choice]
        self.completion_tokens += len(tokens.token_ids)
        text = stream.push(tokens.token_ids, final=tokens.finish_reason is not None)
        reason = "stop" if stream.stopped else tokens.finish_reason
        if reason is not None:
            del self._texts[tokens.choice]
            if tokens.finish_reason is None:
                self._serving.engine.send(Cancel(self._call.handle, tokens.choice))
        if not self._texts:
            self._call.over()
        return Piece(tokens.choice, text, tokens.token_ids, tokens.logprobs, reason)


async def completions(request: web.Request) -> web.StreamResponse:
    """Serve POST /v1/completions."""
    serving = request.app[SERVING]
    return await _serve(request, completion_job(await request.read(), serving.served, serving.tokenizer))


async def chat_completions(request: web.Request) -> web.StreamResponse:
    """Serve POST /v1/chat/completions."""
    serving = request.app[SERVING]
    return await _serve(request, chat_job(await request.read(), serving.served, serving.tokenizer))


async def _serve(request: web.Request, job: Job) -> web.StreamResponse:
    serving = request.app[SERVING]
    serving.require_open()
    began = time.monotonic()
    request_id = request.headers.get(headers.REQUEST_ID, "")[:MAX_REQUEST_ID] or uuid4().hex
    answers = Answers(
        chat=job.chat, request_id=request_id, model=serving.served.model_name, tokenizer=serving.tokenizer
    )
    with serving.engine.call() as call:
        serving.engine.send(_message(call.handle, request_id, job, _prefill_url(request)))
        generation = Generation(call, job, serving)
        started = await generation.start()
        serving.metrics.first_token(time.monotonic() - began)
        answer_headers = _headers(started, len(job.token_ids), request_id)
        if job.stream:
            return await _stream(request, (job, generation, answers), started, answer_headers)
        body = await _collect(job, generation, answers, started)
    return web.json_response(body=msgspec.json.encode(body), headers=answer_headers)


async def _collect(job: Job, generation: Generation, answers: Answers, started: Started) -> dict:
    """Return the whole answer's body."""
    pieces: dict[int, list[Piece]] = {index: [] for index in range(job.choices)}
    async for piece in generation.pieces():
        pieces[piece.index].append(piece)
    choices = []
    for index, parts in pieces.items():
        token_ids = [token for part in parts for token in part.token_ids]
        logprobs = answers.logprobs(token_ids, [entry for part in parts for entry in part.logprobs])
        text = "".join(part.text for part in parts)
        choices.append(answers.whole_choice(index, text, parts[-1].reason or "stop", logprobs))
    return answers.whole(choices, usage_body(len(job.token_ids), generation.completion_tokens, started.cached_tokens))


async def _stream(
    request: web.Request, parts: tuple[Job, Generation, Answers], started: Started, answer_headers: dict[str, str]
) -> web.StreamResponse:
    """Send the answer as server-sent events. An engine that fails on the way becomes an error event."""
    job, generation, answers = parts
    response = web.StreamResponse(headers=answer_headers | {"cache-control": "no-cache"})
    response.content_type = "text/event-stream"
    await response.prepare(request)
    seen: set[int] = set()
    try:
        async for piece in generation.pieces():
            logprobs = answers.logprobs(piece.token_ids, piece.logprobs)
            first = piece.index not in seen
            if piece.text or piece.reason or logprobs or first:
                seen.add(piece.index)
                part = answers.piece(piece.index, piece.text, piece.reason, logprobs, first=first)
                await response.write(_event(answers.chunk([part])))
        if job.include_usage:
            usage = usage_body(len(job.token_ids), generation.completion_tokens, started.cached_tokens)
            await response.write(_event(answers.chunk([]) | {"usage": usage}))
        await response.write(b"data: [DONE]\n\n")
    except EngineError as error:
        await response.write(_event(error_body(str(error), status=error.status, code=error.code)))
    await response.write_eof()
    return response


def _event(body: dict) -> bytes:
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


def _message(handle: int, request_id: str, job: Job, prefill_url: str) -> Generate:
    return Generate(
        handle=handle,
        request_id=request_id,
        token_ids=job.token_ids,
        choices=job.choices,
        max_tokens=job.max_tokens,
        sampling=job.sampling,
        logprobs=job.logprobs,
        prefill_url=prefill_url,
    )


def _prefill_url(request: web.Request) -> str:
    """Return the address of the instance that prefills, empty when that is this one."""
    url = request.headers.get(headers.PREFILL_URL, "")
    if not url:
        return ""
    try:
        parts = urlsplit(url)
        well_formed = parts.scheme == "http" and parts.hostname and parts.port and parts.path in ("", "/")
    except ValueError:
        well_formed = False
    if not well_formed:
        raise RequestError(f"{headers.PREFILL_URL} is {url!r}; want http://host:port", param=headers.PREFILL_URL)
    return url


def _headers(started: Started, prompt_tokens: int, request_id: str) -> dict[str, str]:
    return {
        headers.REQUEST_ID: request_id,
        headers.PROMPT_TOKENS: str(prompt_tokens),
        headers.CACHED_TOKENS: str(started.cached_tokens),
        headers.KV_BYTES: str(started.kv_bytes),
        headers.PREFILL_SECONDS: f"{started.prefill_seconds:.6f}",
        headers.TRANSFER_SECONDS: f"{started.transfer_seconds:.6f}",
        headers.FIRST_BYTE_SECONDS: f"{started.first_byte_seconds:.6f}",
    }
