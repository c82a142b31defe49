"""Proves that long texts and chats are matched by the token ids that their engine gives, and that no request waits long
for them. The engine is a stand-in with the answers and cache events of a real vLLM (vllm_cache_events.json).
"""

import asyncio
import base64
import json
import zlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web
from tests.waiting import PATIENCE_SECONDS, eventually_async

from prfaas.names import HUB
from prfaas.routing.prompt_size import prompt_size
from prfaas.wire import headers
from prfaas.wire.routes import Instance
from prfaas_gateway.kv import tokenizer
from prfaas_gateway.kv.tokenizer import may_tokenize, question_of, wait_seconds

from .conftest import World, answer
from .fleet import Fleet

pytestmark = pytest.mark.system

RECORDED = json.loads((Path(__file__).parent / "vllm_cache_events.json").read_text())["steps"]
TEXTS = [one for one in RECORDED if one["body"] is not None]
LAST = next(number for number, one in enumerate(RECORDED) if one["what"] == "its next turn")
BEFORE = [batch for one in RECORDED[:LAST] for batch in one["batches"]]
BATCHES = "prfaas_gateway_kv_batches_total"
MATCHED = "prfaas_gateway_kv_matched_tokens_total"


def unpacked(text: str) -> bytes:
    return zlib.decompress(base64.b64decode(text))


@pytest.fixture(autouse=True)
def _quick(_quick_pauses, monkeypatch):
    monkeypatch.setattr(tokenizer, "MIN_TEXT_BYTES", 1000)  # the recorded texts are short
    monkeypatch.setattr(tokenizer, "_BASE_SECONDS", 5.0)
    monkeypatch.setattr(tokenizer, "_MAX_WAIT_SECONDS", 5.0)


class Vllms(Fleet):
    """Two vLLM instances; d1 is the recorded one."""

    def __init__(self, world: World):
        super().__init__(world)
        self.questions: list[dict[str, Any]] = []
        self.tokenize: Callable[[dict[str, Any]], Any] = self.recorded

    async def begin(self) -> None:
        await self.start(reply=self.reply)
        for batch in BEFORE:
            self.publishers["d1"].publish(unpacked(batch))
        await self.until(BATCHES, len(BEFORE))
        await self.until('prfaas_gateway_kv_instances{state="followed"}', 2)

    async def reply(self, request: web.Request, body: bytes) -> web.StreamResponse:
        if request.path != "/tokenize":
            return await answer(request, body)
        self.questions.append(json.loads(body))
        reply = self.tokenize(self.questions[-1])
        return await reply if asyncio.iscoroutine(reply) else reply

    @staticmethod
    def recorded(question: dict[str, Any]) -> web.Response:
        """Answer as vLLM did."""
        for step in TEXTS:
            if all(step["body"].get(name) == question.get(name) for name in ("prompt", "messages")):
                token_ids = json.loads(unpacked(step["token_ids"]))
                document = {"count": len(token_ids), "max_model_len": 8192, "tokens": token_ids, "token_strs": None}
                return web.json_response(document)
        return web.json_response({"tokens": list(range(3000))})

    async def serve(self, path: str, body: dict[str, Any], number: int = 0) -> str:
        """Return who served a request."""
        return (await self.post(body, number, path)).headers[headers.DECODE_INSTANCE]

    async def answers(self, kind: str) -> float:
        return await self.world.metric(f'prfaas_gateway_kv_tokenized_total{{answer="{kind}"}}')


@pytest.fixture
async def vllms(world) -> AsyncIterator[Vllms]:
    made = Vllms(world)
    yield made
    for one in made.publishers.values():
        await asyncio.to_thread(one.close)


async def test_texts_and_chats_are_matched_exactly_as_vllm_itself_finds_them(vllms):
    await vllms.begin()
    for what, expected in (("the text a third time", 1280), ("the chat a third time", 1024), ("its next turn", 1024)):
        step = next(one for one in TEXTS if one["what"] == what)
        assert step["hit"] == expected, "vLLM's own count of cached tokens"
        before = await vllms.world.metric(MATCHED)
        assert await vllms.serve(step["path"], step["body"]) == "d1"
        assert await vllms.world.metric(MATCHED) - before == expected
    letters = prompt_size({"prompt": "x" * 1000})
    estimator = vllms.world.running.parts.auth._anybody.estimator
    assert estimator.tokens(letters) > 500, "exact lengths teach the estimate: here a byte is a token"


async def test_the_length_of_token_ids_that_the_engine_cuts_is_what_it_leaves(vllms, caplog):
    caplog.set_level("INFO")
    await vllms.begin()
    ids = {"model": "m", "prompt": list(range(3000))}
    for body, expected in ((ids, 3000), (ids | {"truncate_prompt_tokens": 7}, 7)):
        await vllms.serve("/v1/completions", body)
        assert caplog.text.count(f"estimated_tokens={expected} ") == 1


async def test_a_text_is_tokenized_once_and_kept(vllms):
    await vllms.begin()
    step = next(one for one in TEXTS if one["what"] == "the text again")
    for number in range(6):
        assert await vllms.serve(step["path"], step["body"] | {"max_tokens": number + 1}, number) == "d1"
    assert vllms.questions == [{"model": "m", "prompt": step["body"]["prompt"]}]
    assert (await vllms.answers("asked"), await vllms.answers("kept")) == (1, 5)
    seen = [one for name in ("d0", "d1") for one in vllms.world.workers[name].seen if one.path == step["path"]]
    assert json.loads(seen[0].body) == step["body"] | {"max_tokens": 1}, "the engine gets what the client wrote"
    for _ in range(2):
        await vllms.serve(step["path"], step["body"] | {"cache_salt": "s"})
    assert await vllms.answers("asked") == 2, "whoever has another salt does not learn by the time that it is kept"


async def test_the_next_turn_of_a_chat_is_matched_by_its_last_one_without_waiting(vllms, monkeypatch):
    monkeypatch.setattr(tokenizer, "ENOUGH", 0.5)
    await vllms.begin()
    step = next(one for one in TEXTS if one["what"] == "the chat again")
    await vllms.serve(step["path"], step["body"])
    monkeypatch.setattr(tokenizer, "wait_seconds", lambda _length: pytest.fail("nothing waits"))
    turns = [{"role": "assistant", "content": "ok"}, {"role": "user", "content": "and more? " * 30}]
    body = step["body"] | {"messages": step["body"]["messages"] + turns}
    before = await vllms.world.metric(MATCHED)
    assert await vllms.serve(step["path"], body, 1) == "d1"
    assert await vllms.world.metric(MATCHED) - before == 1024
    assert await vllms.answers("beginning") == 1
    assert len(vllms.questions) == 2, "the whole is tokenized all the same, for the turn after it"


async def test_an_engine_that_is_slow_delays_a_request_by_a_moment_and_its_answer_is_kept(vllms, monkeypatch):
    monkeypatch.setattr(tokenizer, "_BASE_SECONDS", 0.1)
    await vllms.begin()
    step = next(one for one in TEXTS if one["what"] == "the text again")
    answered = asyncio.Event()

    async def slow(question: dict[str, Any]) -> web.Response:
        await answered.wait()
        return vllms.recorded(question)

    vllms.tokenize = slow
    await asyncio.wait_for(vllms.serve(step["path"], step["body"]), PATIENCE_SECONDS)  # the engine has not answered
    assert not answered.is_set()
    assert await vllms.answers("late") == 1
    await vllms.serve(step["path"], step["body"])
    assert len(vllms.questions) == 1, "the open question is not repeated"
    answered.set()
    calls = vllms.world.running.parts.kv._tokenizer._calls
    await eventually_async(lambda: not calls, "the gateway keeps the late answer")
    assert await vllms.serve(step["path"], step["body"]) == "d1"
    assert await vllms.answers("kept") == 1


@pytest.mark.parametrize(
    "tokenize",
    [
        lambda _: web.Response(status=404),
        lambda _: web.Response(status=500),
        lambda _: web.json_response({"tokens": [-1]}),
        lambda _: web.json_response({"tokens": [1 << 32]}),
        lambda _: web.json_response({"tokens": "abc"}),
        lambda _: web.Response(body=b"\xff{"),
    ],
)
async def test_an_engine_that_fails_gets_no_request_and_the_gateways_own_record_counts(vllms, tokenize):
    await vllms.begin()
    vllms.tokenize = tokenize
    step = next(one for one in TEXTS if one["what"] == "the text again")
    first = await vllms.serve(step["path"], step["body"])
    assert {await vllms.serve(step["path"], step["body"], number) for number in range(8)} == {first}
    assert len(vllms.questions) <= 2, "each instance gets one question, then rests"
    assert await vllms.answers("none") == 9


async def test_a_request_that_an_engine_refuses_is_no_failure_of_the_engine(vllms):
    await vllms.begin()
    vllms.tokenize = lambda _: web.json_response({"error": {}}, status=400)
    for length in range(3):
        await vllms.serve("/v1/completions", {"model": "m", "prompt": "y" * (2000 + length)})
    assert len(vllms.questions) == 3


async def test_a_prompt_of_too_many_tokens_does_not_silence_an_engine_for_others(vllms):
    await vllms.begin()
    vllms.tokenize = lambda _: web.json_response({"tokens": [100_000] * 600_000})
    await vllms.serve("/v1/completions", {"model": "m", "prompt": "x" * 2000})
    vllms.tokenize = vllms.recorded
    step = next(one for one in TEXTS if one["what"] == "the text again")
    assert await vllms.serve(step["path"], step["body"]) == "d1"
    assert await vllms.answers("asked") == 1


async def test_short_and_other_prompts_are_never_tokenized(vllms, monkeypatch):
    await vllms.begin()
    image = {"type": "image_url", "image_url": {"url": "data:,"}}
    chat = [{"role": "user", "content": [{"type": "text", "text": "x" * 3000}, image]}]
    for path, more in (
        ("/v1/completions", {"prompt": "y" * 900}),
        ("/v1/completions", {"prompt": "y" * 3000, "truncate_prompt_tokens": 7}),
        ("/v1/completions", {"prompt": list(range(3000))}),
        ("/v1/chat/completions", {"messages": chat}),
        ("/v1/messages", {"messages": chat, "max_tokens": 1}),
    ):
        await vllms.serve(path, {"model": "m"} | more)
    assert vllms.questions == []


async def test_no_more_calls_are_open_than_allowed_and_no_more_ids_are_kept(vllms, monkeypatch):
    monkeypatch.setattr(tokenizer, "MAX_CALLS", 2)
    monkeypatch.setattr(tokenizer, "_BASE_SECONDS", 0.05)
    monkeypatch.setattr(tokenizer, "MAX_KEPT_BYTES", 30_000)
    await vllms.begin()
    answered = asyncio.Event()

    async def slow(_question: dict[str, Any]) -> web.Response:
        await answered.wait()
        return web.json_response({"tokens": list(range(3000))})

    vllms.tokenize = slow
    bodies = [{"model": "m", "prompt": f"{number}" * 2000} for number in range(5)]
    await asyncio.gather(*(vllms.serve("/v1/completions", body) for body in bodies))
    assert len(vllms.questions) == 2
    answered.set()
    kept = vllms.world.running.parts.kv._tokenizer
    for _ in range(3):
        for body in bodies:
            await vllms.serve("/v1/completions", body)
            await eventually_async(lambda: not kept._calls, "every question is answered")
    assert kept._kept_bytes == sum(len(one.data) for one in kept._kept.values()) <= 30_000
    assert len(kept._by_end) == len(kept._kept) == 2
    assert not kept._calls


def raw(body: dict[str, Any]) -> dict[str, msgspec.Raw]:
    return {name: msgspec.Raw(msgspec.json.encode(value)) for name, value in body.items()}


def test_a_question_says_all_that_a_template_depends_on():
    body = {
        "model": "m",
        "messages": [{"role": "user", "content": "one"}],
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "documents": [{"text": "d"}],
        "reasoning_effort": "low",
        "chat_template_kwargs": {"x": 1},
        "continue_final_message": True,
        "add_generation_prompt": False,
        "max_tokens": 5,
    }
    question = question_of("/v1/chat/completions", raw(body), body)
    expected = {name: body[name] for name in body if name in tokenizer._ASKED_OF_CHATS} | {"model": "m"}
    template = {"x": 1, "documents": [{"text": "d"}], "reasoning_effort": "low", "enable_thinking": True}
    assert json.loads(question) == expected | {"chat_template_kwargs": template}
    assert question_of("/v1/messages", raw(body), body) is None
    prompt = {"model": "m", "prompt": "a", "add_special_tokens": False, "prompt_embeds": None}
    assert json.loads(question_of("/v1/completions", raw(prompt), prompt)) == {
        "model": "m",
        "prompt": "a",
        "add_special_tokens": False,
    }
    for more in ({"prompt": ["a"]}, {"prompt_embeds": "x"}, {"truncate_prompt_tokens": 3}):
        assert question_of("/v1/completions", raw(prompt | more), prompt | more) is None


def test_no_other_cluster_gets_a_prompt_that_it_may_be_forbidden_to_see():
    one = Instance(name="a", pool="p", cluster=HUB, role="prefill", url="http://a", engine="vllm-prfaas")
    assert may_tokenize(one)
    assert not may_tokenize(msgspec.structs.replace(one, cluster="eu"))
    assert not may_tokenize(msgspec.structs.replace(one, engine="sglang"))


def test_no_prompt_waits_longer_than_half_a_second(monkeypatch):
    monkeypatch.undo()
    assert [wait_seconds(length) for length in (4096, 100_000, 1_000_000, 4 << 20)] == pytest.approx(
        [0.051, 0.075, 0.3, 0.5], abs=1e-3
    )
