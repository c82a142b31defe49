"""Proves that a broken stream of vLLM continues at another vLLM instance, and ends honestly where none can continue it.

The instances are stand-ins whose streams have the form of recorded ones; tests/vllm has the real ones.
"""

import asyncio
import json
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest
from aiohttp import web
from tests.waiting import eventually_async

from prfaas.errors import BadInputError
from prfaas_gateway import attempts
from prfaas_gateway.engines.token_log import DrawnLog, TokenLog, can_resume
from prfaas_gateway.engines.vllm_resume import AnswerWriter, SentAnswer, stops_of
from prfaas_gateway.openai import DONE
from prfaas_gateway.request import read_fields

from .conftest import QUICK
from .vllm_standin import ANSWER, PROMPT, TOKENS, Vllm

RECORDED = json.loads((Path(__file__).parent / "vllm_streams.json").read_text())
PATIENT = QUICK._replace(recover_seconds=20)
"""For streams that continue: a machine that stands still for a moment breaks none."""
SOON = QUICK._replace(recover_seconds=0.3)
"""For those that cannot."""
COMPLETION = {"model": "m", "prompt": PROMPT, "max_tokens": 200, "stream": True}
CHAT = {"model": "m", "messages": [{"role": "user", "content": "say"}], "stream": True}
COUNTED = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
REQUESTS = {
    "completion": COMPLETION,
    "limited": COMPLETION | {"max_tokens": 30, "stream_options": {"include_usage": True}},
    "counted": COMPLETION | COUNTED,
    "stopped": COMPLETION | {"stop": ["never", "END"], "stream_options": {"include_usage": True}},
    "stopped by one character": COMPLETION | {"stop": "→"},
    "stopped and shown": COMPLETION | {"stop": ["END of", "字 END"], "include_stop_str_in_output": True},
    "chat": CHAT,
    "counted chat": CHAT | COUNTED,
    "stopped chat": CHAT | {"stop": ["END"], "max_completion_tokens": 100},
}


@dataclass
class Answered:
    """What a client read of a stream."""

    text: str = ""
    reasons: list[str] = field(default_factory=list)
    stops: list[str] = field(default_factory=list)
    usage: dict | None = None
    heads: set[tuple] = field(default_factory=set)
    ids: list[int] = field(default_factory=list)

    @classmethod
    def read(cls, body: bytes) -> "Answered":
        self = cls()
        *events, last = body.removesuffix(b"\n\n").split(b"\n\n")
        assert last == b"data: [DONE]", body[-400:]
        for event in events:
            chunk = json.loads(event.removeprefix(b"data: "))
            assert "error" not in chunk
            self.heads.add((chunk["id"], chunk["object"], chunk["created"], chunk["model"]))
            self.usage = chunk.get("usage") or self.usage
            for choice in chunk["choices"]:
                self.text += choice["text"] if "text" in choice else choice["delta"].get("content", "")
                self.reasons += filter(None, [choice["finish_reason"]])
                self.stops += filter(None, [choice.get("stop_reason")])
                self.ids += choice.get("token_ids") or []
        if self.usage is not None:
            self.usage.pop("completion_tokens_details", None)
        return self


def path_of(fields: dict) -> str:
    return "/v1/chat/completions" if "messages" in fields else "/v1/completions"


async def start(world, *names: str, engine: str = "vllm-prfaas", limits=PATIENT, **more) -> None:
    await world.start(*(names or ("d0", "d1")), limits=limits, **more)
    world.change_instances(engine=engine)
    for worker in world.workers.values():
        worker.reply = Vllm()


class Pair(Vllm):
    """One stand-in behind two names: it dies once and continues as the other."""

    def events(self, path: str, fields: dict):
        self.length = 0
        for event in super().events(path, fields):
            self.length += len(f"data: {event}\n\n".encode())
            yield event

    async def _die(self, request: web.Request, response: web.StreamResponse) -> None:
        self.dies_at = None
        await super()._die(request, response)


def both(world, reply: Vllm) -> Vllm:
    for worker in world.workers.values():
        worker.reply = reply
        world.state.ejections.succeeded(worker.name)
    return reply


async def undisturbed(world, fields: dict, parts: int = 1) -> tuple[Answered, int]:
    """Return the whole answer and the length of its stream at the instance."""
    pair = both(world, Pair(parts=parts))
    got = await world.post(fields, path_of(fields))
    return Answered.read(got.body), pair.length


def broken(body: bytes) -> dict:
    """Return the error that a broken stream ends with."""
    return json.loads(body.removesuffix(DONE).strip().split(b"\n\n")[-1].removeprefix(b"data: "))["error"]


def shape(value) -> object:
    """Return the form of a JSON value: keys in their order, and kinds of values."""
    if isinstance(value, dict):
        return [(name, shape(one)) for name, one in value.items()]
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return [shape(one) for one in value]
    return type(value).__name__


# The form of the stand-in, and of what the client sees


@pytest.mark.parametrize("name", RECORDED)
def test_the_stand_in_speaks_as_the_recorded_vllm_does(name):
    recorded = RECORDED[name]
    fields = (CHAT if "chat" in name else COMPLETION) | {"max_tokens": 6}
    fields |= {"return_token_ids": name.endswith("-ids")} | (COUNTED if "continuous" in name else {})
    spoken = [f"data: {one}" for one in Vllm().events(recorded["path"], fields)]
    assert len(spoken) == len(recorded["stream"])
    for ours, theirs in zip(spoken[:-1], recorded["stream"][:-1], strict=True):
        assert shape(json.loads(ours[6:])) == shape(json.loads(theirs[6:]))
    assert spoken[-1] == recorded["stream"][-1]


@pytest.mark.parametrize("name", [name for name in RECORDED if not name.endswith("-ids")])
@pytest.mark.parametrize("cut", [1, 7, 100, 1 << 20])
def test_a_client_that_asks_for_no_ids_gets_what_vllm_would_send_it_byte_for_byte(name, cut):
    recorded = RECORDED[name + "-ids"]
    stream = b"".join(one.encode() + b"\n\n" for one in recorded["stream"])
    log = TokenLog(recorded["path"], {})
    got = b"".join(log.take(stream[at : at + cut]) for at in range(0, len(stream), cut))
    assert got == b"".join(one.encode() + b"\n\n" for one in RECORDED[name]["stream"])
    assert log.is_whole
    answered = log.answered
    assert answered is not None
    assert (len(answered.prompt_ids), len(answered.sent_ids)) == ((23, 6) if "chat" in name else (11, 6))


def test_the_ids_of_a_long_prompt_are_kept_once():
    prompt = ",".join(map(str, range(100_000)))
    event = '{"id":"c","choices":[{"index":0,"text":"x","prompt_token_ids":[%s],"token_ids":[5]}]}'
    log = TokenLog("/v1/completions", {})
    log.take(f"data: {event % prompt}\n\n".encode())
    kept = [value for value in vars(log).values() if isinstance(value, bytes | bytearray) and len(value) > 1000]
    assert [one.decode() for one in kept] == [prompt]
    assert log.answered is not None
    assert len(log.answered.prompt_ids) == 100_000


@pytest.mark.parametrize("fields", REQUESTS.values(), ids=REQUESTS)
async def test_an_undisturbed_stream_is_what_the_instance_itself_would_send(world, fields):
    await start(world)
    got = await world.post(fields, path_of(fields))
    assert got.body.decode() == "".join(f"data: {one}\n\n" for one in Vllm().events(path_of(fields), fields))


# Events that cannot be read

FIRST = b'data: {"id":"c","object":"o","created":1,"model":"m","choices":[]}'
ANSWERED = SentAnswer(FIRST, b"1,2", b"3", is_chat=False)
NESTING = [b"[" * levels + b"]" * levels for levels in range(1, 1200)]


@pytest.mark.parametrize(
    "event",
    [
        b'{"choices":[{"text":"x","token_ids":[4],"finish_reason":"stop"}],"more":%b}',
        b'{"choices":[{"text":"x","token_ids":[4],"finish_reason":"stop","more":%b}]}',
        b'{"choices":[],"usage":{"prompt_tokens_details":{"cached_tokens":1,"more":%b}}}',
    ],
)
def test_an_event_of_any_nesting_continues_an_answer_or_is_no_chunk(event):
    """What can just be decoded may be too deep to be encoded again."""
    written, refused = 0, []
    for nested in NESTING:
        writer = AnswerWriter(ANSWERED, {}, "")
        try:
            written += writer.rewrite(b"data: " + event % nested + b"\n\n").startswith(b"data: {")
        except BadInputError as error:
            refused.append((str(error).partition(" while")[0], writer.new_ids, writer.has_finished, writer.has_usage))
    why = "an instance continues with an event that is no chunk: maximum recursion depth exceeded"
    assert set(refused) == {(why, b"", False, False)}, "its tokens were not sent"
    assert written + len(refused) == len(NESTING)
    assert min(written, len(refused)) > 100


@pytest.mark.parametrize("where", [b'{"choices":[],"more":%b}', b'{"choices":[],"system_fingerprint":"f","id":%b}'])
def test_a_stream_that_begins_with_an_event_of_any_nesting_continues_or_cannot(where):
    continued, refused = 0, []
    for nested in NESTING:
        log = DrawnLog("/v1/completions", {})
        log.take(b"data: " + where % nested + b"\n\n")
        answered = log.answered
        assert answered is not None
        try:
            written = AnswerWriter(answered, {}, "").rewrite(b'data: {"choices":[]}\n\n')
            fingerprint = log.asks["prfaas_stream"].model
        except BadInputError as error:
            refused.append(str(error).partition(" while")[0])
        else:
            continued += 1
            is_head = b'"id":' + nested in written
            assert (is_head, fingerprint) == ((False, "") if b"more" in where else (True, "f"))
    assert set(refused) == {"a stream begins with an event that is no chunk: maximum recursion depth exceeded"}
    assert min(continued, len(refused)) > 100


def test_a_field_that_the_engine_read_and_we_cannot_lets_no_answer_go_on():
    assert stops_of({"stop": msgspec.Raw(b'["END"]')}).texts == ("END",)
    for nested in (b'{"a":1}', b"[1]", b"[" * 3000):
        with pytest.raises(BadInputError, match="a field of the request cannot be read"):
            stops_of({"stop": msgspec.Raw(nested)})


# A stream that breaks


@pytest.mark.parametrize("how", ["resets", "ends", "fails"])
@pytest.mark.parametrize("fields", REQUESTS.values(), ids=REQUESTS)
async def test_a_stream_continues_wherever_its_instance_dies(world, fields, how):
    await start(world)
    whole, length = await undisturbed(world, fields)
    for place in [*range(1, length - 1, 211), length - 1]:
        both(world, Pair(place, how))
        got = await world.post(fields, path_of(fields))
        assert (got.status, Answered.read(got.body)) == (200, whole), f"died after byte {place} of {length}"


@pytest.mark.parametrize("engine", ["vllm-nixl", "vllm-mooncake"])
async def test_every_connector_of_vllm_continues_a_stream(world, engine):
    await start(world, engine=engine)
    whole, length = await undisturbed(world, COMPLETION)
    both(world, Pair(length // 2))
    assert Answered.read((await world.post(COMPLETION, "/v1/completions")).body) == whole


@pytest.mark.parametrize("name", ["completion", "stopped", "stopped and shown", "stopped chat"])
async def test_chunks_of_several_tokens_may_end_within_a_character(world, name):
    fields = REQUESTS[name]
    await start(world)
    whole, length = await undisturbed(world, fields, parts=3)
    for place in range(50, length, 173):
        both(world, Pair(place, parts=3))
        got = Answered.read((await world.post(fields, path_of(fields))).body)
        if "stop" in fields:  # the tokens of a chunk behind a stop string are counted
            assert got.usage is None or 0 <= got.usage["completion_tokens"] - whole.usage["completion_tokens"] < 3
            got.usage = whole.usage
        assert got == whole, f"died after byte {place}"


class Dying(Vllm):
    """Dies once at each of some places of its streams."""

    def __init__(self, *places: int):
        super().__init__()
        self.places = list(places)

    async def __call__(self, request: web.Request, body: bytes) -> web.StreamResponse:
        if "/v1/" in request.path and request.method == "POST":
            self.dies_at = self.places.pop(0) if self.places else None
        return await super().__call__(request, body)


@pytest.mark.parametrize("name", ["completion", "stopped", "counted chat"])
async def test_a_stream_continues_after_a_second_and_a_third_break(world, name, monkeypatch):
    monkeypatch.setattr(attempts, "PROBATION_SECONDS", 0.0)  # as if each instance had served it for long
    await start(world)
    fields = REQUESTS[name]
    whole, _ = await undisturbed(world, fields)
    for places in ((1500, 1, 700), (900, 1100, 1300), (2000, 300, 2)):
        reply = both(world, Dying(*places))
        assert Answered.read((await world.post(fields, path_of(fields))).body) == whole, places
        assert len(reply.requests) == 4


async def test_the_next_instance_gets_the_ids_and_what_is_left_of_the_limits(world):
    await start(world, clusters=())
    fields = COMPLETION | {"max_tokens": 60, "min_tokens": 50, "seed": 7, "top_p": 0.9, "stop": ["END"]}
    fields |= {"frequency_penalty": 0.5, "presence_penalty": 1.0, "logit_bias": {"195": 3.0, "65": 1.0}}
    reply = both(world, Pair(1200))
    await world.post(fields, "/v1/completions")
    (_, first), (path, then) = reply.requests
    sent = then["prompt"][len(PROMPT) :]
    assert first == fields | {"return_token_ids": True}
    assert path == "/v1/completions"
    assert then["prompt"] == list((PROMPT + ANSWER).encode())[: len(PROMPT) + len(sent)]
    assert len(sent) > 3
    assert (then["max_tokens"], then["min_tokens"]) == (60 - len(sent), 50 - len(sent))
    assert (then["seed"], then["top_p"], then["stream"], then["return_token_ids"]) == (7, 0.9, True, True)
    assert "stop" not in then, "the gateway looks for them, from the held text on"
    counts = {token: sent.count(token) for token in sent}
    assert then["logit_bias"]["195"] == 3.0 - 0.5 * counts[195] - 1.0
    assert then["logit_bias"]["65"] == 1.0
    assert then["logit_bias"][str(sent[1])] == -0.5 * counts[sent[1]] - 1.0


@pytest.mark.parametrize("temperature", [0, 0.5, None])
async def test_a_stream_that_continues_has_events_only(world, temperature):
    await start(world)
    both(world, Pair(1200))
    got = await world.post(COMPLETION | {"temperature": temperature, "seed": 7}, "/v1/completions")
    assert all(event.startswith(b"data: ") for event in got.body.removesuffix(b"\n\n").split(b"\n\n"))
    assert Answered.read(got.body).text == ANSWER


async def test_a_chat_without_a_limit_may_fill_the_models_context(world):
    await start(world)
    reply = both(world, Pair(1200))
    fields = CHAT | {"chat_template_kwargs": {"a": 1}, "tools": [], "response_format": {"type": "text"}}
    await world.post(fields, "/v1/chat/completions")
    _, (path, then) = reply.requests
    assert (path, then["max_tokens"]) == ("/v1/completions", 4096 - len(then["prompt"]))
    assert not {"messages", "chat_template_kwargs", "tools", "response_format"} & set(then)


async def test_a_continuation_may_be_offloaded_like_any_prompt(world):
    await start(world, "d0", "d1", "x0", tokens=1)
    whole, length = await undisturbed(world, COMPLETION)
    pair = both(world, Pair(length // 2))
    assert Answered.read((await world.post(COMPLETION, "/v1/completions")).body) == whole
    source, destination = [body for _, body in pair.requests if "kv_transfer_params" in body][-2:]
    assert source["prompt"] == destination["prompt"]
    assert {"stream": False, "max_tokens": 1}.items() <= source.items()


async def test_a_client_that_requests_ids_gets_them_once(world):
    fields = COMPLETION | {"return_token_ids": True}
    await start(world)
    whole, length = await undisturbed(world, fields)
    assert whole.ids == list(ANSWER.encode())
    went_on = 0
    for place in range(300, length, 397):
        both(world, Pair(place))
        got = await world.post(fields, "/v1/completions", headers={"Connection": "close"})
        if b'"error"' in got.body:  # it has the ids of half a character
            assert "cut in the middle" in broken(got.body)["message"]
        else:
            assert Answered.read(got.body) == whole
            went_on += 1
    assert went_on > 10


async def test_after_the_last_token_nothing_is_computed_again(world):
    fields = REQUESTS["limited"]
    await start(world)
    whole, length = await undisturbed(world, fields)
    for place in (length - len(DONE) - 1, length - 1):
        reply = both(world, Pair(place))
        assert Answered.read((await world.post(fields, "/v1/completions")).body) == whole
        assert len(reply.requests) == 1


@pytest.mark.system
async def test_the_gateway_ends_a_leg_whose_stop_string_it_found(world):
    fields = REQUESTS["stopped"]
    await start(world)

    class Endless(Pair):
        async def __call__(self, request, body):
            response = await super().__call__(request, body)
            if request.path == "/v1/completions" and len(self.requests) == 2:
                await asyncio.Event().wait()
            return response

    whole, _ = await undisturbed(world, fields)
    both(world, Endless(900))
    assert Answered.read((await world.post(fields, "/v1/completions")).body) == whole
    workers = world.workers.values()
    await eventually_async(lambda: any(one.aborted.is_set() for one in workers), "the gateway ends the leg")


async def test_an_error_before_the_first_token_is_retried_although_the_status_was_200(world):
    await start(world)
    error = {"message": "EngineCore", "type": "InternalServerError", "code": 500}
    failing = []

    async def fail_once(request: web.Request, body: bytes) -> web.StreamResponse:
        failing.append(body)
        if len(failing) > 1:
            return await Vllm()(request, body)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b"data: " + json.dumps({"error": error}).encode() + b"\n\ndata: [DONE]\n\n")
        return response

    for worker in world.workers.values():
        worker.reply = fail_once
    got = await world.post(COMPLETION, "/v1/completions")
    assert (got.status, Answered.read(got.body).text) == (200, ANSWER)


async def test_a_silent_instance_is_left_for_another(world):
    await start(world, limits=PATIENT._replace(stall_seconds=0.5))
    both(world, Pair(1500, "stalls"))
    got = await world.post(COMPLETION, "/v1/completions")
    assert Answered.read(got.body).text == ANSWER


# A stream that cannot go on


REFUSED = {
    "two answers": {"n": 2},
    "log probabilities": {"logprobs": 1},
    "an echo": {"echo": True},
    "a grammar": {"response_format": {"type": "json_object"}},
    "structured outputs": {"structured_outputs": {"regex": "a*"}},
    "guided decoding": {"guided_regex": "a*"},
    "tools": {"tools": [{"type": "function"}]},
}


async def check_broken(world, reply: Vllm, fields: dict) -> dict:
    """Check that a stream ends with an error and that no other instance is tried; return what the first one got."""
    await start(world)
    both(world, reply)
    got = await world.post(fields, path_of(fields))
    assert broken(got.body)["code"] == "stream_broken"
    ((_, body),) = reply.requests
    assert body.pop("cache_salt"), "of the places that may give caches"
    return body


@pytest.mark.parametrize("more", REFUSED.values(), ids=REFUSED)
async def test_an_answer_that_keeps_a_state_ends_with_an_error(world, more):
    fields = COMPLETION | more
    assert await check_broken(world, Pair(900), fields) == fields, "the gateway requests no ids"


@pytest.mark.parametrize("delta", [{"reasoning": "hm"}, {"tool_calls": [{"index": 0}]}])
async def test_what_a_parser_took_apart_is_not_put_together_again(world, delta):
    class Parsing(Pair):
        def events(self, path, fields):
            parsed = json.dumps(delta, separators=(",", ":"))
            for event in super().events(path, fields):
                yield event.replace('{"content":"b"}', parsed)

    await check_broken(world, Parsing(1500), CHAT)


async def test_an_image_is_not_taken_for_its_ids(world):
    parts = [{"type": "text", "text": "what?"}, {"type": "image_url", "image_url": {"url": "data:,"}}]
    await check_broken(world, Pair(1500), CHAT | {"messages": [{"role": "user", "content": parts}]})


async def test_an_instance_that_names_no_ids_ends_with_an_error(world):
    class Older(Pair):
        def events(self, path, fields):
            return super().events(path, {name: value for name, value in fields.items() if name != "return_token_ids"})

    await check_broken(world, Older(900), COMPLETION)


async def test_an_instance_that_cannot_tell_texts_continues_no_stream(world):
    await start(world, limits=SOON)

    class Mute(Pair):
        async def __call__(self, request, body):
            if request.path == "/detokenize":
                return web.Response(status=404)
            return await super().__call__(request, body)

    both(world, Mute(900))
    got = await world.post(COMPLETION, "/v1/completions")
    assert "/detokenize" in broken(got.body)["message"]


async def test_our_own_worker_does_not_continue_an_answer_of_vllm(world):
    await start(world, limits=SOON)
    instances = [world.table.instances[0], msgspec.structs.replace(world.table.instances[1], engine="prfaas")]

    class Switching(Pair):
        async def _die(self, request, response):
            world.state.set_table(msgspec.structs.replace(world.table, instances=tuple(instances)))
            world.workers["d0"].reply = Vllm(0)
            await super()._die(request, response)

    world.state.set_table(msgspec.structs.replace(world.table, instances=tuple(instances[:1])))
    world.workers["d0"].reply = Switching(900)
    got = await world.post(COMPLETION, "/v1/completions")
    assert b'"error"' in got.body
    assert not [one for one in world.workers["d1"].seen if one.path == "/v1/completions"]


def test_only_streams_of_one_text_ask_for_ids():
    def asks(body: dict, path: str = "/v1/completions") -> bool:
        return can_resume(path, read_fields(json.dumps(body).encode(), every=True)[1])

    assert asks(COMPLETION)
    assert asks(CHAT | {"tools": None, "logprobs": False, "n": 1}, "/v1/chat/completions")
    assert not asks(COMPLETION | {"stream": False})
    assert not asks(COMPLETION, "/v1/responses")
    assert asks(COMPLETION | {"prompt": ["one"]})
    assert not asks(COMPLETION | {"prompt": ["one", "two"]})
    assert not asks(COMPLETION | {"prompt": [[1, 2], [3]]})
    assert not asks(COMPLETION | {"n": 100})
    assert TOKENS > 60
