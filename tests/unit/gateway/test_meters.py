"""Proves that limits hold for each client separately, that the stated wait is enough, and that nothing is starved."""

import asyncio
import json
from contextlib import suppress

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st
from tests.clocks import Clock
from tests.waiting import eventually_async

from prfaas.routing.estimate import TokenEstimator
from prfaas.routing.prompt_size import PromptSize
from prfaas.util import RateBucket
from prfaas.wire import headers
from prfaas_gateway.api import Answers
from prfaas_gateway.auth import ApiClient, Charge, Meter, Meters
from prfaas_gateway.openai import LimitError

from .conftest import Reply

KEY, OTHER = "sk-0123456789abcdef", "sk-fedcba9876543210"
LETTERS = PromptSize((500, *PromptSize().counts[1:]))
EXACT = 5000


def let_in(meter: Meter, tokens: int = 0) -> float:
    """Return 0 where a request is let in, and passes, or after how many seconds it is to come again."""
    try:
        with meter.request():
            meter.charge(tokens)
    except LimitError as error:
        return error.retry_after_seconds
    return 0.0


@given(
    per_minute=st.integers(1, 10_000),
    steps=st.lists(st.tuples(st.floats(0, 30), st.integers(1, 500)), min_size=1, max_size=60),
)
def test_no_stretch_of_time_sees_more_than_the_rate_and_one_minutes_worth(per_minute, steps):
    bucket, now, used = RateBucket(per_minute / 60, per_minute, 0.0), 0.0, 0
    for waited, amount in steps:
        now += waited
        if not bucket.delay_seconds(amount, now):
            bucket.take(amount, now)
            used += amount
        assert used <= per_minute * (1 + now / 60) + 1e-6


def test_the_stated_wait_is_enough_and_less_is_not():
    clock = Clock(1000.0)
    meter = Meter(ApiClient("a", requests_per_minute=3), clock)
    assert [let_in(meter) for _ in range(4)] == [0, 0, 0, pytest.approx(20)]
    clock.seconds += 19.9
    assert let_in(meter) == pytest.approx(0.1)
    clock.seconds += 0.11
    assert let_in(meter) == 0


def test_a_prompt_longer_than_a_minutes_tokens_is_served_and_paid_back_before_the_next():
    clock = Clock(1000.0)
    meter = Meter(ApiClient("a", tokens_per_minute=1000), clock)
    assert let_in(meter, 3000) == 0
    assert let_in(meter, 1) == pytest.approx(120, abs=0.1)
    clock.seconds += 121
    assert let_in(meter, 1) == 0


def test_a_request_frees_its_place_in_flight_however_it_ends():
    meter = Meter(ApiClient("a", max_in_flight=1), Clock(1000.0))
    with suppress(ZeroDivisionError), meter.request():
        assert let_in(meter) == 1
        raise ZeroDivisionError
    assert (let_in(meter), meter.in_flight) == (0, 0)


def test_clients_do_not_share_and_changed_limits_keep_what_is_in_flight():
    meters = Meters(Clock(1000.0))
    a, b = ApiClient("a", max_in_flight=1), ApiClient("b", max_in_flight=1)
    with meters.of(a).request():
        assert let_in(meters.of(b)) == 0
        assert let_in(meters.of(a)) > 0
        assert let_in(meters.of(ApiClient("a", max_in_flight=2))) == 0
        assert let_in(meters.of(a)) > 0
    assert meters.of(a).in_flight == 0


def test_changed_limits_keep_what_was_spent():
    clock = Clock(1000.0)
    meters = Meters(clock)

    def wait_seconds(tokens: int = 0, **limits: int) -> float:
        return let_in(meters.of(ApiClient("a", **limits)), tokens)

    assert [wait_seconds(requests_per_minute=3) for _ in range(4)] == [0, 0, 0, pytest.approx(20)]
    assert wait_seconds(requests_per_minute=3, max_in_flight=9) > 0, "another limit changed, and this one began afresh"
    assert wait_seconds(requests_per_minute=60) == pytest.approx(1)
    clock.seconds += 31
    assert [wait_seconds(requests_per_minute=2) for _ in range(2)] == [0, pytest.approx(29)]
    assert wait_seconds(3000, tokens_per_minute=1000) == 0
    assert wait_seconds(tokens_per_minute=100) == pytest.approx(120, abs=1), "a debt takes as long as it did"
    assert wait_seconds(tokens_per_minute=1_000_000) == pytest.approx(0, abs=0.1), "a higher limit pays a debt sooner"


def test_an_exact_length_settles_what_the_estimate_charged_and_later_ones_change_nothing():
    meter = Meter(ApiClient("a", tokens_per_minute=1000), Clock(1000.0))
    charge = Charge(meter, LETTERS, 600)
    charge.settle(0)
    assert meter._tokens.level(1000.0) == 400
    for exact_tokens in (100, 900):
        charge.settle(exact_tokens)
    assert meter._tokens.level(1000.0) == 900
    Charge(meter, LETTERS, 100).settle(2000)
    assert meter._tokens.level(1000.0) == -1100
    assert meter.estimator.tokens(LETTERS) > TokenEstimator().tokens(LETTERS), "exact lengths teach, too"


def test_answers_are_charged_a_minutes_tokens_at_most_until_they_have_ended():
    meter = Meter(ApiClient("a", tokens_per_minute=1000), Clock(1000.0))
    charge = Charge(meter, LETTERS, 10, Answers(100_000, 100, 100))
    assert meter._tokens.level(1000.0) == -10, "else a client would wait for more than an hour"
    charge.settle_answers(50)
    assert meter._tokens.level(1000.0) == 940
    Charge(meter, LETTERS, 40, Answers(100_000)).settle_answers(3000)
    assert meter._tokens.level(1000.0) == -2100, "what was computed is charged, however much it is"


def test_a_charge_that_is_given_back_leaves_nothing():
    meter = Meter(ApiClient("a", tokens_per_minute=1000), Clock(1000.0))
    Charge(meter, LETTERS, 10, Answers(100_000)).give_back()
    assert meter._tokens.level(1000.0) == 1000


def test_without_a_limit_of_tokens_nothing_is_charged():
    assert Meter(ApiClient("a"), Clock(1000.0)).most_of(100_000) == 100_000


# Through the gateway


@pytest.fixture
def keys(tmp_path):
    folder = tmp_path / "keys"
    folder.mkdir()

    def write(**limits):
        (folder / "a").write_text(json.dumps({"keys": [KEY], **limits}))
        (folder / "b").write_text(OTHER)
        return folder

    return write


def bearer(key: str = KEY) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


async def test_beyond_a_rate_the_answer_is_429_with_the_time_to_wait_and_reaches_no_worker(world, keys, short):
    await world.start("d0", keys_dir=keys(requestsPerMinute=2))
    answers = [await world.post(short, headers=bearer()) for _ in range(3)]
    assert [one.status for one in answers] == [200, 200, 429]
    error = answers[2].json["error"]
    assert (error["type"], error["code"]) == ("requests", "rate_limit_exceeded")
    assert 1 <= int(answers[2].headers["retry-after"]) <= 30
    assert (await world.post(short, headers=bearer(OTHER))).status == 200
    assert len(world.workers["d0"].seen) == 3
    assert await world.metric('prfaas_gateway_requests_total{decision="none",outcome="rejected"}') == 1


async def test_long_prompts_use_up_tokens(world, keys, long):
    await world.start("d0", keys_dir=keys(tokensPerMinute=15_000))
    answers = [await world.post(long, headers=bearer()) for _ in range(3)]
    assert [one.status for one in answers] == [200, 200, 429]
    assert answers[2].json["error"]["type"] == "tokens"


def answer_of(document: dict, **sent: str) -> Reply:
    async def reply(_request: web.Request, _body: bytes) -> web.StreamResponse:
        return web.json_response(document, headers=sent)

    return reply


def stream_of(*events: dict) -> Reply:
    async def reply(request: web.Request, _body: bytes) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for event in (*(json.dumps(one, separators=(",", ":")) for one in events), "[DONE]"):
            await response.write(f"data: {event}\n\n".encode())
        return response

    return reply


COMPLETION, CHAT = "/v1/completions", "/v1/chat/completions"
TEXT, CHAT_TEXT = {"model": "m", "prompt": "hi"}, {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
ASKED = {**CHAT_TEXT, "stream": True, "n": 2, "stream_options": {"include_usage": True}}
FIRST = {"index": 0, "text": "a", "prompt_token_ids": [7] * EXACT, "token_ids": [104], "finish_reason": "length"}
FORGED = {"choices": [{"text": '"prompt_tokens":5000,"input_tokens":5000'}]}
NAMES = {"prompt_tokens": 1, "input_tokens": 1}
ECHOED = {"type": "object", "properties": NAMES, "usage": NAMES} | NAMES
RESPONSE = {
    "tools": [{"type": "function", "name": "f", "parameters": ECHOED}],
    "usage": {"input_tokens": EXACT},
    "text": {"format": {"type": "json_schema", "schema": ECHOED}},
}
LONG_RESPONSE = {"instructions": "x" * 300_000} | RESPONSE
ASKED_RESPONSE, ASKED_MESSAGE = {"model": "m", "input": "hi"}, {**CHAT_TEXT, "max_tokens": 1}
FORGED_INPUT = {"content": [{"type": "tool_use", "input": {"usage": {"input_tokens": EXACT}, "prompt_tokens": EXACT}}]}
COUNTS = {
    "a header of our worker": ("prfaas", COMPLETION, TEXT, answer_of({}, **{headers.PROMPT_TOKENS: str(EXACT)})),
    "usage": ("vllm-nixl", COMPLETION, TEXT, answer_of({"usage": {"prompt_tokens": EXACT, "total_tokens": 1}})),
    "usage of Messages": (
        "vllm-nixl",
        "/v1/messages",
        ASKED_MESSAGE,
        answer_of({"content": [{"type": "tool_use", "input": ECHOED}], "usage": {"input_tokens": EXACT}}),
    ),
    "usage of Responses": ("vllm-nixl", "/v1/responses", ASKED_RESPONSE, answer_of(RESPONSE)),
    "usage at the end of a stream of Responses": (
        "vllm-nixl",
        "/v1/responses",
        {**ASKED_RESPONSE, "stream": True},
        stream_of({"type": "response.completed", "response": RESPONSE}),
    ),
    "usage in a long event of Responses": (
        "vllm-nixl",
        "/v1/responses",
        {**ASKED_RESPONSE, "stream": True},
        stream_of({"type": "response.completed", "response": LONG_RESPONSE}),
    ),
    "usage before the end of a stream of Messages": (
        "vllm-nixl",
        "/v1/messages",
        {**ASKED_MESSAGE, "stream": True},
        stream_of({"type": "message_delta", "usage": {"input_tokens": EXACT}}, {"type": "message_stop"}),
    ),
    "usage beside tools and metadata with its names": (
        "vllm-nixl",
        "/v1/responses",
        {"model": "m", "input": "hi"},
        answer_of(
            {
                "tools": [{"parameters": {"prompt_tokens": 1}}],
                "usage": {"input_tokens": EXACT},
                "metadata": {"input_tokens": 1},
            }
        ),
    ),
    "usage behind tools with its names at a stream's end": (
        "vllm-nixl",
        "/v1/responses",
        {"model": "m", "input": "hi", "stream": True},
        stream_of({"response": {"tools": [{"parameters": {"prompt_tokens": 1}}], "usage": {"input_tokens": EXACT}}}),
    ),
    "the ids in a stream": ("vllm-nixl", COMPLETION, {**TEXT, "stream": True}, stream_of({"choices": [FIRST]})),
    "usage at a stream's end": (
        "vllm-nixl",
        CHAT,
        ASKED,
        stream_of({"choices": [{"delta": {}}]}, {"choices": [], "usage": {"prompt_tokens": EXACT}}),
    ),
    "none": ("vllm-nixl", CHAT, ASKED, stream_of(FORGED)),
    "none, in an object": ("vllm-nixl", "/v1/messages", ASKED_MESSAGE, answer_of(FORGED_INPUT)),
    "none, whole": ("vllm-nixl", COMPLETION, TEXT, answer_of(FORGED)),
}


@pytest.mark.parametrize("how", COUNTS)
async def test_what_a_key_has_left_follows_the_exact_count_of_every_answer(world, keys, how):
    """Estimates are of a few tokens; the first answer counts more than a minute's worth."""
    engine, path, body, reply = COUNTS[how]
    await world.start("d0", keys_dir=keys(tokensPerMinute=1000), engine=engine)
    world.workers["d0"].reply = reply
    statuses = [(await world.post(body, path, headers=bearer())).status for _ in range(2)]
    assert statuses == [200, 200 if how.startswith("none") else 429]


async def test_a_prompt_that_no_instance_gets_costs_nothing(world, keys):
    await world.start("d0", keys_dir=keys(tokensPerMinute=1000))
    unknown = {"model": "other", "prompt": "x" * 40_000}
    statuses = [(await world.post(one, COMPLETION, headers=bearer())).status for one in (unknown, unknown, TEXT)]
    assert statuses == [404, 404, 200]


async def test_a_prompt_that_was_estimated_too_long_costs_what_it_has(world, keys, long):
    await world.start("d0", keys_dir=keys(tokensPerMinute=1000))
    world.workers["d0"].reply = answer_of({}, **{headers.PROMPT_TOKENS: "10"})
    assert [(await world.post(long, headers=bearer())).status for _ in range(3)] == [200] * 3


@pytest.mark.system
async def test_places_in_flight_come_back_when_a_client_leaves(world, keys, short):
    await world.start("d0", keys_dir=keys(maxInFlight=1))
    here, serve = asyncio.Event(), world.workers["d0"].reply

    async def never(_request, _body) -> web.StreamResponse:
        here.set()
        await asyncio.Event().wait()

    world.workers["d0"].reply = never
    first = asyncio.create_task(world.post(short, headers=bearer()))
    await here.wait()
    assert (await world.post(short, headers=bearer())).status == 429
    first.cancel()
    await world.workers["d0"].wait_aborted()
    world.workers["d0"].reply = serve

    async def status_of_another() -> int:
        status = (await world.post(short, headers=bearer())).status
        return 0 if status == 429 else status

    assert await eventually_async(status_of_another, "the gateway sees that the client left") == 200
