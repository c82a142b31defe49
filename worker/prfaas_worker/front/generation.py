"""POST /v1/completions and /v1/chat/completions: one request from its body to its last byte.

Nothing is sent before the first token of every prompt exists: until then whatever fails is an HTTP status, with which
the gateway can try elsewhere. A client that goes away cancels the handler, which ends the calls in the engine, and
there the prefill at the other instance.
"""

import time
from collections.abc import Sequence
from typing import Any, Final, NamedTuple
from uuid import uuid4

import msgspec
from aiohttp import web

from prfaas.errors import InternalError
from prfaas.wire import headers
from prfaas.wire.engine import Cancel, Generate, Started, Tokens
from prfaas.wire.resume import Resume
from prfaas.wire.trace import read_trace
from prfaas_worker.front import byte_map
from prfaas_worker.front.answers import Answers, Piece, error_body, sse, usage_body
from prfaas_worker.front.checks import require_instance
from prfaas_worker.front.choices import Choice
from prfaas_worker.front.engine_client import Answer, Call, EngineError
from prfaas_worker.front.openai import Job, chat_job, completion_job
from prfaas_worker.front.reading import read_request
from prfaas_worker.front.resuming import (
    Ledger,
    Line,
    MakeJob,
    fingerprint_of,
    lines,
    read_asked,
    reader,
    replay,
)
from prfaas_worker.front.serving import SERVING, Serving
from prfaas_worker.front.spans import Decode

MAX_REQUEST_ID: Final = 128


class Planned(NamedTuple):
    """What a request asks for, where it goes on if it does, and the calls of the engine that this takes."""

    job: Job
    resume: Resume | None
    lines: list[Line]


class Generation:
    """The engine's calls of one request, as text. The counts grow with `pieces`.

    Raises:
        RequestError: it is to be resumed, and its tokens make another text than the one that was sent.

    """

    def __init__(self, call: Call, asked: Planned, serving: Serving):
        self._call = call
        self._serving = serving
        self._choices: dict[tuple[int, int], Choice] = {}
        self._running: dict[int, int] = {}
        job, resume = asked.job, asked.resume
        for handle, line in zip(call.handles, asked.lines, strict=True):
            self._running[handle] = line.choices
            for number in range(line.first, line.first + line.choices):
                index = line.place * job.choices + number
                choice = Choice(index, job, line.prompt.echo, serving.tokenizer)
                if line.sent is not None:
                    replay(choice, line.sent)
                self._choices[handle, number] = choice
        self._early: list[Answer] = []
        self._prompt_tokens = job.prompt_tokens
        self._cached_tokens = 0
        self._told_cached_tokens = resume.cached_tokens if resume else None
        self.completion_tokens = sum(len(sent.token_ids) for sent in resume.choices.values()) if resume else 0

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
        cached_tokens = self._cached_tokens if self._told_cached_tokens is None else self._told_cached_tokens
        return usage_body(self._prompt_tokens, self.completion_tokens, cached_tokens)

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


class Others(NamedTuple):
    """Other instances that a request names: who prefills, who may have a prefix, and the clusters of both."""

    prefill_url: str
    prefix_url: str
    prefill_cluster: str
    prefix_cluster: str


async def _serve(request: web.Request, make: MakeJob) -> web.StreamResponse:
    request_id = _request_id(request)
    with Decode(request.app[SERVING].tracing, read_trace(request.headers), request_id) as spans:
        return await _answer(request, make, request_id, spans)


async def _answer(request: web.Request, make: MakeJob, request_id: str, spans: Decode) -> web.StreamResponse:
    serving = request.app[SERVING]
    began = time.monotonic()
    serving.require_open()
    asked = read_asked(request)
    data, (job, resume) = await read_request(request, reader(make, asked), asked.document_bytes)
    serving.require_open()
    fingerprint = fingerprint_of(serving, resume)
    created = asked.fixed.created if asked.fixed else None
    answers = Answers(job, request_id, serving.served.model_name, serving.tokenizer, created)
    others = _others(request)
    planned = Planned(job, resume, lines(job, resume))
    with serving.engine.call(len(planned.lines)) as call:
        generation = Generation(call, planned, serving)
        for message in _messages(call, request_id, planned, others):
            serving.engine.send(spans.begin(message))
        byte_map.teach(serving, data[asked.document_bytes :], job)
        started = await generation.start()
        spans.started(started)
        serving.metrics.first_token(time.monotonic() - began)
        answer_headers = _headers(started, job.prompt_tokens, request_id)
        if job.stream:
            ledger = Ledger(resume) if asked.fixed else None
            told = answer_headers | ({headers.RESUMABLE: fingerprint} if ledger else {})
            return await _stream(request, (job, generation, answers, spans, ledger), told)
        whole = await _collect(generation, answers)
    return web.json_response(body=msgspec.json.encode(whole), headers=answer_headers)


async def _collect(generation: Generation, answers: Answers) -> dict[str, Any]:
    """Return the whole answer's body."""
    pieces: dict[int, list[Piece]] = {}
    while batch := await generation.pieces():
        for piece in batch:
            pieces.setdefault(piece.index, []).append(piece)
    return answers.whole([answers.whole_choice(pieces[index]) for index in sorted(pieces)], generation.usage)


async def _stream(
    request: web.Request,
    parts: tuple[Job, Generation, Answers, Decode, Ledger | None],
    answer_headers: dict[str, str],
) -> web.StreamResponse:
    """Send the answer as server-sent events. An engine that fails on the way becomes an error event."""
    job, generation, answers, spans, ledger = parts
    response = web.StreamResponse(headers=answer_headers | {"cache-control": "no-cache"})
    response.content_type = "text/event-stream"
    await response.prepare(request)
    try:
        while pieces := await generation.pieces():
            usage = generation.usage if job.continuous_usage else None
            events = [answers.event(piece, usage) for piece in pieces]
            if ledger is not None:
                events = [ledger.told(*one) for one in zip(pieces, events, strict=True)]
            if data := b"".join(events):
                await response.write(data)
        end = answers.usage_event(generation.usage) if job.include_usage else b""
        await response.write(end + b"data: [DONE]\n\n")
    except EngineError as error:
        spans.fail(str(error))
        await response.write(sse(error_body(str(error), status=error.status, code=error.code)))
    await response.write_eof()
    return response


def _messages(call: Call, request_id: str, planned: Planned, others: Others) -> list[Generate]:
    job = planned.job
    return [
        Generate(
            handle=handle,
            request_id=request_id,
            token_ids=line.prompt.token_ids,
            choices=line.choices,
            max_tokens=line.prompt.max_tokens,
            sampling=line.prompt.sampling,
            logprobs=job.logprobs,
            prefill_url=others.prefill_url,
            min_tokens=job.min_tokens,
            ignore_eos=job.ignore_eos,
            stop_token_ids=job.stop_token_ids,
            grammar=job.grammar,
            cache_salt=job.cache_salt,
            prefix_url=others.prefix_url,
            prefill_cluster=others.prefill_cluster,
            prefix_cluster=others.prefix_cluster,
            generated=line.generated,
            choice=line.first,
        )
        for handle, line in zip(call.handles, planned.lines, strict=True)
    ]


def _request_id(request: web.Request) -> str:
    """Return the caller's id of a request, one of our own where there is none or it is no text."""
    given = request.headers.get(headers.REQUEST_ID, "")[:MAX_REQUEST_ID]
    return given if given and given.isascii() else uuid4().hex


def _others(request: web.Request) -> Others:
    """Read the headers that name other instances."""
    options, given = request.app[SERVING].options, request.headers
    prefill_url = require_instance(given.get(headers.PREFILL_URL, ""), options, headers.PREFILL_URL)
    prefix_url = require_instance(given.get(headers.PREFIX_URL, ""), options, headers.PREFIX_URL)
    prefill_cluster, prefix_cluster = (
        given.get(name, "") for name in (headers.PREFILL_CLUSTER, headers.PREFIX_CLUSTER)
    )
    return Others(prefill_url, prefix_url, prefill_cluster, prefix_cluster)


def _headers(started: Sequence[Started], prompt_tokens: int, request_id: str) -> dict[str, str]:
    """Return the headers of an answer; of several prompts, tokens and bytes in all and the longest of each time."""
    transfers = ",".join(one.transfer_id for one in started if one.transfer_id)
    return ({headers.TRANSFER_ID: transfers} if transfers else {}) | {
        headers.REQUEST_ID: request_id,
        headers.PROMPT_TOKENS: str(prompt_tokens),
        headers.CACHED_TOKENS: str(sum(one.cached_tokens for one in started)),
        headers.KV_BYTES: str(sum(one.kv_bytes for one in started)),
        headers.QUEUE_SECONDS: f"{max((one.queue_seconds for one in started), default=0.0):.6f}",
        headers.PREFILL_SECONDS: f"{max((one.prefill_seconds for one in started), default=0.0):.6f}",
        headers.TRANSFER_SECONDS: f"{max((one.transfer_seconds for one in started), default=0.0):.6f}",
        headers.FIRST_BYTE_SECONDS: f"{max((one.first_byte_seconds for one in started), default=0.0):.6f}",
    }
