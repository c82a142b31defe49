"""POST /v1/completions and /v1/chat/completions: one request from its body to its last byte.

Nothing is sent before the first token of every prompt exists: until then whatever fails is an HTTP status, with which
the gateway can try elsewhere. A client that goes away cancels the handler, which ends the calls in the engine, and
there the prefill at the other instance.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any, Final
from urllib.parse import urlsplit
from uuid import uuid4

import msgspec
from aiohttp import web

from prfaas.errors import InternalError, RequestError
from prfaas.wire import headers
from prfaas.wire.engine import Cancel, Generate, Started, Tokens
from prfaas_worker.front import byte_map
from prfaas_worker.front.answers import Answers, Piece, error_body, sse, usage_body
from prfaas_worker.front.checks import Served
from prfaas_worker.front.choices import Choice
from prfaas_worker.front.engine_client import Answer, Call, EngineError
from prfaas_worker.front.openai import Job, chat_job, completion_job
from prfaas_worker.front.reading import in_thread
from prfaas_worker.front.serving import SERVING, Serving
from prfaas_worker.tokenizer import Tokenizer

MAX_REQUEST_ID: Final = 128

MakeJob = Callable[[bytes, Served, Tokenizer], Job]


class Generation:
    """The engine's calls of one request, as text. The counts grow with `pieces`."""

    def __init__(self, call: Call, job: Job, serving: Serving):
        self._call = call
        self._serving = serving
        self._choices = {
            (handle, number): Choice(place * job.choices + number, job, prompt.echo, serving.tokenizer)
            for place, (handle, prompt) in enumerate(zip(call.handles, job.prompts, strict=True))
            for number in range(job.choices)
        }
        self._running = dict.fromkeys(call.handles, job.choices)
        self._early: list[Answer] = []
        self._prompt_tokens = job.prompt_tokens
        self._cached_tokens = 0
        self.completion_tokens = 0

    async def start(self) -> list[Started]:
        """Wait until the first token of every prompt exists.

        Raises:
            EngineError: one of them will not.

        """
        started: list[Started] = []
        while len(started) < len(self._running):
            answer = await self._call.next()
            if isinstance(answer, Started):
                started.append(answer)
            elif started:
                self._early.append(answer)  # of a prompt that did not have to wait as long
            else:
                raise InternalError(f"the engine began an answer with {type(answer).__name__}")
        self._cached_tokens = sum(one.cached_tokens for one in started)
        return started

    async def pieces(self) -> list[Piece]:
        """Wait for what is new, and return all that waited; empty once every choice has ended.

        Raises:
            EngineError: the engine failed on the way.

        """
        while self._choices:
            answers, self._early = self._early or await self._call.some(), []
            if found := [piece for answer in answers if (piece := self._piece(answer)) is not None]:
                return found
        return []

    @property
    def usage(self) -> dict[str, Any]:
        """Usage so far."""
        return usage_body(self._prompt_tokens, self.completion_tokens, self._cached_tokens)

    def _piece(self, answer: Answer) -> Piece | None:
        if not isinstance(answer, Tokens) or (choice := self._choices.get((answer.handle, answer.choice))) is None:
            return None
        self.completion_tokens += len(answer.token_ids)
        piece = choice.piece(answer)
        if piece.reason is not None:
            self._ended(answer)
        return piece

    def _ended(self, answer: Tokens) -> None:
        del self._choices[answer.handle, answer.choice]
        self._running[answer.handle] -= 1
        if answer.finish_reason is None:  # a stop string, of which the engine knows nothing
            self._serving.engine.send(Cancel(answer.handle, answer.choice))
        if not self._running[answer.handle]:
            self._call.over(answer.handle)


async def completions(request: web.Request) -> web.StreamResponse:
    """Serve POST /v1/completions."""
    return await _serve(request, completion_job)


async def chat_completions(request: web.Request) -> web.StreamResponse:
    """Serve POST /v1/chat/completions."""
    return await _serve(request, chat_job)


async def _serve(request: web.Request, make: MakeJob) -> web.StreamResponse:
    serving = request.app[SERVING]
    began = time.monotonic()
    job = await in_thread(serving, make, await request.read())
    serving.require_open()
    request_id = _request_id(request)
    answers = Answers(job, request_id, serving.served.model_name, serving.tokenizer)
    prefill_url = _prefill_url(request)
    with serving.engine.call(len(job.prompts)) as call:
        for message in _messages(call, request_id, job, prefill_url):
            serving.engine.send(message)
        byte_map.teach(serving, await request.read(), job)
        generation = Generation(call, job, serving)
        started = await generation.start()
        serving.metrics.first_token(time.monotonic() - began)
        answer_headers = _headers(started, job.prompt_tokens, request_id)
        if job.stream:
            return await _stream(request, (job, generation, answers), answer_headers)
        body = await _collect(generation, answers)
    return web.json_response(body=msgspec.json.encode(body), headers=answer_headers)


async def _collect(generation: Generation, answers: Answers) -> dict[str, Any]:
    """Return the whole answer's body."""
    pieces: dict[int, list[Piece]] = {}
    while batch := await generation.pieces():
        for piece in batch:
            pieces.setdefault(piece.index, []).append(piece)
    return answers.whole([answers.whole_choice(pieces[index]) for index in sorted(pieces)], generation.usage)


async def _stream(
    request: web.Request, parts: tuple[Job, Generation, Answers], answer_headers: dict[str, str]
) -> web.StreamResponse:
    """Send the answer as server-sent events. An engine that fails on the way becomes an error event."""
    job, generation, answers = parts
    response = web.StreamResponse(headers=answer_headers | {"cache-control": "no-cache"})
    response.content_type = "text/event-stream"
    await response.prepare(request)
    try:
        while pieces := await generation.pieces():
            usage = generation.usage if job.continuous_usage else None
            if events := b"".join([answers.event(piece, usage) for piece in pieces]):
                await response.write(events)
        end = answers.usage_event(generation.usage) if job.include_usage else b""
        await response.write(end + b"data: [DONE]\n\n")
    except EngineError as error:
        await response.write(sse(error_body(str(error), status=error.status, code=error.code)))
    await response.write_eof()
    return response


def _messages(call: Call, request_id: str, job: Job, prefill_url: str) -> list[Generate]:
    return [
        Generate(
            handle=handle,
            request_id=request_id,
            token_ids=prompt.token_ids,
            choices=job.choices,
            max_tokens=prompt.max_tokens,
            sampling=prompt.sampling,
            logprobs=job.logprobs,
            prefill_url=prefill_url,
            min_tokens=job.min_tokens,
            ignore_eos=job.ignore_eos,
            stop_token_ids=job.stop_token_ids,
            grammar=job.grammar,
            cache_salt=job.cache_salt,
        )
        for handle, prompt in zip(call.handles, job.prompts, strict=True)
    ]


def _request_id(request: web.Request) -> str:
    """Return the caller's id of a request, one of our own where there is none or it is no text."""
    given = request.headers.get(headers.REQUEST_ID, "")[:MAX_REQUEST_ID]
    return given if given and given.isascii() else uuid4().hex


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


def _headers(started: Sequence[Started], prompt_tokens: int, request_id: str) -> dict[str, str]:
    """Return the headers of an answer; of several prompts, tokens and bytes in all and the longest of each time."""
    return {
        headers.REQUEST_ID: request_id,
        headers.PROMPT_TOKENS: str(prompt_tokens),
        headers.CACHED_TOKENS: str(sum(one.cached_tokens for one in started)),
        headers.KV_BYTES: str(sum(one.kv_bytes for one in started)),
        headers.QUEUE_SECONDS: f"{max(one.queue_seconds for one in started):.6f}",
        headers.PREFILL_SECONDS: f"{max(one.prefill_seconds for one in started):.6f}",
        headers.TRANSFER_SECONDS: f"{max(one.transfer_seconds for one in started):.6f}",
        headers.FIRST_BYTE_SECONDS: f"{max(one.first_byte_seconds for one in started):.6f}",
    }
