"""The text endpoints: completions and chats from their bodies to their last bytes, and /tokenize and /detokenize.

Nothing is sent before the first token of every prompt exists. Until then a failure is an HTTP status, with which the
gateway can try elsewhere. A client that disconnects cancels the handler. That ends the calls in the engine, and with
them the prefill at the other instance.

A request also teaches routers. Those without a tokenizer match byte blocks. A tokenised request shows which block of
tokens surely lies behind each of its byte blocks. The gateway hashes the same canonical bytes with the same code. What
it learns is a hint: workers decide on the tokens themselves.
"""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final
from uuid import uuid4

import msgspec
from aiohttp import web

from prfaas.errors import InternalError, RequestError
from prfaas.http_server import STREAM_HEADERS, error_body
from prfaas.kvindex.blocks import BLOCK_TOKENS, BlockChain, chain_root
from prfaas.kvindex.bytes import block_ends, byte_hashes
from prfaas.kvindex.canonical import CHAT_FIELDS, COMPLETION_FIELDS, canonical_chat, canonical_completion, tokens_before
from prfaas.wire import headers
from prfaas.wire.engine import Cancel, Generate, Started, Tokens
from prfaas.wire.kvevents import ByteBlock
from prfaas.wire.resume import Resume
from prfaas.wire.trace import read_trace
from prfaas_worker.front.engine_client import EngineAnswer, EngineCall, EngineError
from prfaas_worker.front.openai_bodies import DetokenizeBody, TokenizeBody, read_body
from prfaas_worker.front.openai_in import Job, RequestHeaders, RequestReader, conversation_tokens, refuse_unserved
from prfaas_worker.front.openai_out import ChoiceDetokenizer, Piece, ResponseFormatter, sse, usage_body
from prfaas_worker.front.resume import TokenComments, read_resume, read_resume_headers, remaining_messages, replay
from prfaas_worker.front.serving import (
    STATE,
    FrontState,
    ServedModel,
    read_request,
    require_instance,
    require_model,
    require_tokens,
)
from prfaas_worker.front.spans import RequestSpans
from prfaas_worker.tokenizer import Tokenizer

MAX_REQUEST_ID: Final = 128
INLINE_MAP_BYTES: Final = 16 << 10  # The byte blocks of a body up to this length take well under a millisecond.

MakeJob = Callable[[RequestReader, bytes], Job]


async def completions(request: web.Request) -> web.StreamResponse:
    return await _serve(request, RequestReader.completion_job)


async def chat_completions(request: web.Request) -> web.StreamResponse:
    return await _serve(request, RequestReader.chat_job)


async def tokenize(request: web.Request) -> web.Response:
    """Serve POST /tokenize: the token ids of a prompt or a conversation, in vLLM's form."""
    _, answer = await read_request(request, _tokenized)
    return web.json_response(body=answer)


async def detokenize(request: web.Request) -> web.Response:
    """Serve POST /detokenize: the text of token ids, with special tokens."""
    _, answer = await read_request(request, _detokenized)
    return web.json_response(body=answer)


class EngineCalls:
    """The engine's calls of one request, as pieces of its choices. `call` has a handle for each of `messages`, keyed by
    their first choice. With `resume` an answer continues: RequestError if it makes another text."""

    def __init__(
        self, call: EngineCall, messages: Mapping[int, Generate], job: Job, resume: Resume | None, state: FrontState
    ):
        self._call = call
        self._engine = state.engine
        self._messages = messages
        self._prompt_tokens = job.prompt_tokens
        self._choices: dict[tuple[int, int], ChoiceDetokenizer] = {}
        self._running: dict[int, int] = {}
        self._early: list[EngineAnswer] = []
        self._cached_tokens = 0
        self._resumed_cached_tokens = resume.cached_tokens if resume else None
        self._completion_tokens = sum(len(sent.token_ids) for sent in resume.choices.values()) if resume else 0
        for handle, (first, message) in zip(call.handles, messages.items(), strict=True):
            self._running[handle] = message.choices
            for number in range(message.choices):
                choice = ChoiceDetokenizer(first + number, job, state.tokenizer)
                if resume is not None and (sent := resume.choices.get(choice.index)) is not None:
                    replay(choice, sent)
                self._choices[handle, message.choice + number] = choice

    def send(self, spans: RequestSpans) -> None:
        for handle, message in zip(self._call.handles, self._messages.values(), strict=True):
            trace = spans.begin(handle, message)
            self._engine.send(msgspec.structs.replace(message, handle=handle, trace=trace))

    async def start(self) -> list[Started]:
        """Wait until the first token of every prompt exists. Raises EngineError if a prompt fails."""
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
        """Wait for news; none once every choice has ended. Raises EngineError if the engine fails."""
        while self._choices:
            answers, self._early = self._early or await self._call.next_all(), []
            if found := [piece for answer in answers if (piece := self._piece(answer)) is not None]:
                return found
        return []

    @property
    def usage(self) -> dict[str, Any]:
        resumed = self._resumed_cached_tokens
        return usage_body(
            self._prompt_tokens, self._completion_tokens, self._cached_tokens if resumed is None else resumed
        )

    def _piece(self, answer: EngineAnswer) -> Piece | None:
        if not isinstance(answer, Tokens) or (choice := self._choices.get((answer.handle, answer.choice))) is None:
            return None
        self._completion_tokens += len(answer.token_ids)
        piece = choice.piece(answer)
        if piece.reason is not None:
            self._end(answer)
        return piece

    def _end(self, answer: Tokens) -> None:
        del self._choices[answer.handle, answer.choice]
        self._running[answer.handle] -= 1
        if answer.finish_reason is None:  # a stop string, of which the engine knows nothing
            self._engine.send(Cancel(answer.handle, answer.choice))
        if not self._running[answer.handle]:
            self._call.finish(answer.handle)


@dataclass(frozen=True)
class _Reply:
    job: Job
    calls: EngineCalls
    formatter: ResponseFormatter
    spans: RequestSpans
    comments: TokenComments | None

    async def whole(self, answer_headers: Mapping[str, str]) -> web.Response:
        pieces: dict[int, list[Piece]] = {}
        while batch := await self.calls.pieces():
            for piece in batch:
                pieces.setdefault(piece.index, []).append(piece)
        choices = [self.formatter.whole_choice(pieces[index]) for index in sorted(pieces)]
        body = self.formatter.whole(choices, self.calls.usage)
        return web.json_response(body=msgspec.json.encode(body), headers=answer_headers)

    async def stream(self, request: web.Request, answer_headers: Mapping[str, str]) -> web.StreamResponse:
        """Send the answer as server-sent events. If the engine fails on the way, send an error event."""
        calls, formatter, comments = self.calls, self.formatter, self.comments
        response = web.StreamResponse(headers={**answer_headers, **STREAM_HEADERS})
        response.content_type = "text/event-stream"
        await response.prepare(request)
        try:
            while pieces := await calls.pieces():
                usage = calls.usage if self.job.has_continuous_usage else None
                events = [formatter.event(piece, usage) for piece in pieces]
                if data := b"".join(events) if comments is None else comments.add(pieces, events):
                    await response.write(data)
            end = formatter.usage_event(calls.usage) if self.job.has_usage else b""
            await response.write(end + b"data: [DONE]\n\n")
        except EngineError as error:
            self.spans.fail(str(error))
            await response.write(sse(error_body(str(error), status=error.status, code=error.code)))
        await response.write_eof()
        return response


async def _serve(request: web.Request, make_job: MakeJob) -> web.StreamResponse:
    state = request.app[STATE]
    request_id = _request_id(request)
    with RequestSpans(state.tracing, read_trace(request.headers), request_id) as spans:
        return await _answer(request, make_job, request_id, spans)


async def _answer(request: web.Request, make_job: MakeJob, request_id: str, spans: RequestSpans) -> web.StreamResponse:
    state = request.app[STATE]
    began = time.monotonic()
    state.require_open()
    head = _read_headers(request, request_id)

    def read(data: bytes, served: ServedModel, tokenizer: Tokenizer) -> tuple[Job, Resume | None]:
        document, body = data[: head.resume_bytes], data[head.resume_bytes :]
        job = make_job(RequestReader(served, tokenizer, head), body)
        return job, read_resume(document, job, served) if head.resume_bytes else None

    size, (job, resume) = await read_request(request, read, head.resume_bytes)
    state.require_open()
    created = head.resumable.created if head.resumable else None
    formatter = ResponseFormatter(job, state.served.model_name, state.tokenizer, created)
    messages = remaining_messages(job, resume)
    with state.engine.call(len(messages)) as call:
        calls = EngineCalls(call, messages, job, resume, state)
        reply = _Reply(job, calls, formatter, spans, TokenComments(resume) if head.resumable else None)
        calls.send(spans)
        _record_prompt(state, job, size)
        started = await calls.start()
        spans.end_prefills(started)
        state.metrics.first_token(time.monotonic() - began)
        answer_headers = _headers(started, job.prompt_tokens, request_id)
        if not job.body.stream:
            return await reply.whole(answer_headers)
        if head.resumable:
            answer_headers[headers.RESUMABLE] = state.served.fingerprint
        return await reply.stream(request, answer_headers)


def _request_id(request: web.Request) -> str:
    request_id = request.headers.get(headers.REQUEST_ID, "")[:MAX_REQUEST_ID]
    return request_id if request_id and request_id.isascii() else uuid4().hex


def _read_headers(request: web.Request, request_id: str) -> RequestHeaders:
    options, received = request.app[STATE].options, request.headers
    resumable, resume_bytes = read_resume_headers(received)
    return RequestHeaders(
        request_id=request_id,
        prefill_url=require_instance(received.get(headers.PREFILL_URL, ""), options, headers.PREFILL_URL),
        prefill_cluster=received.get(headers.PREFILL_CLUSTER, ""),
        prefix_url=require_instance(received.get(headers.PREFIX_URL, ""), options, headers.PREFIX_URL),
        prefix_cluster=received.get(headers.PREFIX_CLUSTER, ""),
        resumable=resumable,
        resume_bytes=resume_bytes,
    )


def _headers(started: Sequence[Started], prompt_tokens: int, request_id: str) -> dict[str, str]:
    """Return an answer's headers; for several prompts the sums of tokens and bytes and the longest times."""
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


def _record_prompt(state: FrontState, job: Job, size: int) -> None:
    """Publish the byte blocks of a request, in a thread for a long one, while the engine works already."""
    if len(job.prompts) != 1:
        return
    make = partial(_byte_blocks, job, state.served.fingerprint, state.tokenizer.token_bytes)
    if size <= INLINE_MAP_BYTES:
        state.events.learn(make())
        return
    found = asyncio.get_running_loop().run_in_executor(state.reader(size), make)
    found.add_done_callback(lambda done: done.cancelled() or state.events.learn(done.result()))


def _byte_blocks(job: Job, fingerprint: str, token_bytes: Callable[[int], bytes]) -> list[ByteBlock]:
    """Return the byte blocks of a request, with the last whole block of its only prompt's tokens in each. It includes
    those before the first whole block: a reader that knows a byte block then knows all before it."""
    canonical_of, fields = (canonical_chat, CHAT_FIELDS) if job.is_chat else (canonical_completion, COMPLETION_FIELDS)
    try:
        canonical = canonical_of({name: getattr(job.body, name, None) for name in fields})
    except RecursionError:
        return []
    if canonical is None:
        return []
    (prompt,) = job.prompts
    hashes = byte_hashes(canonical.root, canonical.data)
    counts = tokens_before(canonical, block_ends(hashes), prompt.token_ids, token_bytes)
    chain = BlockChain(chain_root(fingerprint, prompt.cache_salt))
    chain.extend(prompt.token_ids)
    blocks = [count // BLOCK_TOKENS for count in counts]
    return [
        ByteBlock(byte_hash, chain.hashes[block - 1] if block else b"", block * BLOCK_TOKENS)
        for byte_hash, block in zip(hashes, blocks, strict=True)
    ]


def _tokenized(data: bytes, served: ServedModel, tokenizer: Tokenizer) -> bytes:
    body = read_body(data, TokenizeBody)
    require_model(body.model or served.model_name, served)
    refuse_unserved(body)
    if (body.prompt is None) == (body.messages is None):
        raise RequestError("give either prompt or messages", param="prompt")
    if body.prompt is not None:
        tokens = tokenizer.encode(body.prompt, framed=body.add_special_tokens is not False)
    else:
        tokens = conversation_tokens(body, tokenizer)
    answer: dict[str, Any] = {"count": len(tokens), "max_model_len": served.max_context, "tokens": tokens}
    if body.return_token_strs:
        answer["token_strs"] = [tokenizer.decode([token]) for token in tokens]
    return msgspec.json.encode(answer)


def _detokenized(data: bytes, served: ServedModel, tokenizer: Tokenizer) -> bytes:
    body = read_body(data, DetokenizeBody)
    require_model(body.model or served.model_name, served)
    return msgspec.json.encode({"prompt": tokenizer.decode(require_tokens(body.tokens, served, "tokens"))})
