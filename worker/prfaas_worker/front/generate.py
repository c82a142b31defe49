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
from prfaas.rights import PREFILLS, STEER
from prfaas.wire import headers
from prfaas.wire.engine import Announced, Cancel, Generate, GiveCache, LearnBytes, Started, Tokens
from prfaas.wire.kvevents import ByteBlock, ByteMapBatch, encode_byte_map
from prfaas.wire.prefill import is_whole_prefill, names_sources
from prfaas.wire.trace import TraceContext, read_trace, split, write_parts
from prfaas_worker.front.auth import COUNTED_AS, require_right
from prfaas_worker.front.engine_client import EngineAnswer, EngineCall, EngineError
from prfaas_worker.front.openai_bodies import DetokenizeBody, TokenizeBody, read_body
from prfaas_worker.front.openai_in import Job, RequestReader, conversation_tokens, refuse_unserved, refused_stream
from prfaas_worker.front.openai_out import ChoiceDetokenizer, Piece, ResponseFormatter, sse, usage_body
from prfaas_worker.front.serving import (
    STATE,
    FrontState,
    ServedModel,
    read_places,
    read_request,
    require,
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
    their first choice. Raises RequestError for a choice that continues, and whose text has ended already."""

    def __init__(self, call: EngineCall, messages: Mapping[int, Generate], job: Job, state: FrontState):
        self._call = call
        self._engine = state.engine
        self._messages = messages
        self._lengths = [len(prompt.token_ids) for prompt in job.prompts]
        self._places = {handle: first // job.choices for handle, first in zip(call.handles, messages, strict=True)}
        self._choices: dict[tuple[int, int], ChoiceDetokenizer] = {}
        self._running: dict[int, int] = {}
        self._early: list[EngineAnswer] = []
        self._cached_tokens = 0
        self._completion_tokens = sum(map(len, job.drawn.values()))
        for handle, (first, message) in zip(call.handles, messages.items(), strict=True):
            self._running[handle] = message.choices
            for number in range(message.choices):
                choice = ChoiceDetokenizer(first + number, job, state.tokenizer)
                if (drawn := job.drawn.get(choice.index)) and choice.replay(drawn).reason is not None:
                    raise refused_stream(f"choice {choice.index} has ended, and is to continue")
                self._choices[handle, message.choice + number] = choice

    def send(self, spans: RequestSpans, places: tuple[str, ...] | None) -> None:
        for handle, message in zip(self._call.handles, self._messages.values(), strict=True):
            trace = spans.begin(handle, message)
            self._engine.send(msgspec.structs.replace(message, handle=handle, trace=trace, places=places))

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
        # Choices that continue share a prompt, and their drawn tokens may be cached, too.
        cached = {self._places[one.handle]: one.cached_tokens for one in started}
        self._cached_tokens = sum(min(tokens, self._lengths[place]) for place, tokens in cached.items())
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
        return usage_body(sum(self._lengths), self._completion_tokens, self._cached_tokens)

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
        calls, formatter = self.calls, self.formatter
        response = web.StreamResponse(headers={**answer_headers, **STREAM_HEADERS})
        response.content_type = "text/event-stream"
        await response.prepare(request)
        try:
            while pieces := await calls.pieces():
                usage = calls.usage if self.job.has_continuous_usage else None
                if data := b"".join(formatter.event(piece, usage) for piece in pieces):
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

    def read(body: bytes, served: ServedModel, tokenizer: Tokenizer) -> Job:
        return make_job(RequestReader(served, tokenizer, request_id), body)

    size, job = await read_request(request, read)
    state.require_open()
    if state.credentials is not None:
        legs = [prompt.leg for prompt in job.prompts if prompt.leg is not None]
        asks = PREFILLS if all(map(is_whole_prefill, legs)) else STEER  # which names an address, and no client may
        require_right(request, state.credentials, asks if legs else request.path, param=STEER if legs else None)
        require(all(map(names_sources, legs)), STEER, "must name the source's cluster, which it has to prove")
    formatter = ResponseFormatter(job, state.served, state.tokenizer)
    if job.gives_cache:
        return await _give_cache(request, job, formatter, spans.begin_source())
    messages = job.messages()
    with state.engine.call(len(messages)) as call:
        calls = EngineCalls(call, messages, job, state)
        reply = _Reply(job, calls, formatter, spans)
        calls.send(spans, read_places(request))
        _record_prompt(state, job, size)
        started = await calls.start()
        ended = time.monotonic()
        # The last prompt was waited for; a stream that only had its end to come has none.
        parts = split(began, ended, started[-1].moments if started else ())
        spans.end_prefills(started, parts)
        state.metrics.first_token(ended - began)
        answer_headers = _headers(started, job.prompt_tokens, request_id) | {headers.TTFT_SECONDS: write_parts(parts)}
        if not job.body.stream:
            return await reply.whole(answer_headers)
        return await reply.stream(request, answer_headers)


async def _give_cache(
    request: web.Request, job: Job, formatter: ResponseFormatter, trace: TraceContext
) -> web.Response:
    """Serve a source's leg: its prompt is computed for a destination, which answers the client. This answer is empty.
    A caller that leaves before it ends the prefill."""
    state, (prompt,) = request.app[STATE], job.prompts
    leg = prompt.leg
    if leg is None:
        raise InternalError("a source's leg has no transfer")
    with state.engine.call() as call:
        message = GiveCache(
            handle=call.handle,
            request_id=prompt.request_id,
            token_ids=prompt.token_ids,
            leg=leg,
            cache_salt=prompt.cache_salt,
            trace=trace,
            places=read_places(request),
            caller=request.get(COUNTED_AS, ""),
        )
        state.engine.send(message)
        await call.expect(Announced)
        started = await call.expect(Started)
        call.finish()  # from here on its lease ends it
    choice = formatter.whole_choice([Piece(0, "", (), "length", True, ())])
    body = formatter.whole([choice], usage_body(job.prompt_tokens, 0, started.cached_tokens))
    answer_headers = _headers([started], job.prompt_tokens, prompt.request_id)
    return web.json_response(body=msgspec.json.encode(body), headers=answer_headers)


def _request_id(request: web.Request) -> str:
    request_id = request.headers.get(headers.REQUEST_ID, "")[:MAX_REQUEST_ID]
    return request_id if request_id and request_id.isascii() else uuid4().hex


def _headers(started: Sequence[Started], prompt_tokens: int, request_id: str) -> dict[str, str]:
    """Return an answer's headers; for several prompts the sums of tokens and bytes and the longest times."""
    transfers = {
        headers.TRANSFER_ID: ",".join(one.transfer_id for one in started if one.transfer_id),
        headers.LOST_TRANSFER: ",".join(one.lost_transfer for one in started if one.lost_transfer),
    }
    return {name: ids for name, ids in transfers.items() if ids} | {
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
    make = partial(_byte_map, job, state.served.fingerprint, state.tokenizer.token_bytes)
    if size <= INLINE_MAP_BYTES:
        _publish(state, make())
        return
    found = asyncio.get_running_loop().run_in_executor(state.reader(size), make)
    found.add_done_callback(lambda done: done.cancelled() or _publish(state, done.result()))


def _publish(state: FrontState, payload: bytes) -> None:
    if payload:
        state.engine.send(LearnBytes(payload))


def _byte_map(job: Job, fingerprint: str, token_bytes: Callable[[int], bytes]) -> bytes:
    """Return the byte blocks of a request as a batch of the byte map; empty if there are none."""
    blocks = _byte_blocks(job, fingerprint, token_bytes)
    return encode_byte_map(ByteMapBatch(time.time(), blocks)) if blocks else b""


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
