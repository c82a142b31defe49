"""Proves the small things beside a stream: the end that is kept of it, the budget of retries, and the watch over what
moves.
"""

import asyncio
import json
from itertools import pairwise
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas_gateway import stream
from prfaas_gateway.openai import UsedTokens, find_usage
from prfaas_gateway.state import RETRIES_PER_REQUEST, RETRIES_PER_SECOND, SAVED_RETRIES, RetryBudget
from prfaas_gateway.stream import EVENT_STREAM, TAIL_BYTES, AnswerStream, AnswerTail, StallTimer


@given(st.lists(st.integers(0, 3000), max_size=9), st.lists(st.integers(1, 30_000), max_size=9))
def test_the_end_of_an_answer_begins_with_a_whole_line(lengths: list[int], places: list[int]):
    whole, tail = b"".join(b"x" * length + b"\n" for length in lengths), AnswerTail()
    for start, end in pairwise(sorted({0, len(whole), *(place for place in places if place < len(whole))})):
        tail.add(whole[start:end])
    kept, whole = tail.read(), b"\n\n" + whole
    assert whole.endswith(kept)
    assert whole[: len(whole) - len(kept)][-1:] in (b"", b"\n")
    assert min(len(whole), TAIL_BYTES) <= len(kept) <= TAIL_BYTES + 2 * 3001


def test_a_line_without_an_end_is_not_kept_and_its_rest_is_no_event(monkeypatch):
    monkeypatch.setattr(stream, "MAX_LINE_BYTES", 5000)
    tail = AnswerTail()
    for _ in range(100):
        tail.add(b"data: " + b"x" * 92 + b"da")
        assert len(tail.read()) <= 5000
    tail.add(b'ta: {"usage": {"prompt_tokens": 7}}\n\n')
    assert find_usage("/v1/completions", tail.read()) == UsedTokens()
    tail.add(b'data: {"usage": {"prompt_tokens": 8}}\n\n')
    assert find_usage("/v1/completions", tail.read()) == UsedTokens(prompt_tokens=8)


@pytest.mark.parametrize(
    ("path", "events", "wanted"),
    [
        ("/v1/completions", [{"prompt_tokens": 8, "completion_tokens": 0}], UsedTokens(8, 0)),
        ("/v1/completions", [{"prompt_tokens": 8, "completion_tokens": 3}, {"completion_tokens": 0}], UsedTokens(8, 0)),
        ("/v1/completions", [{"prompt_tokens": 8, "completion_tokens": None}], UsedTokens(8, None)),
        ("/v1/completions", [{"prompt_tokens": -8}], UsedTokens()),
        ("/v1/messages", [{"input_tokens": 8, "output_tokens": 1}, {"output_tokens": 0}], UsedTokens(8, 0)),
    ],
)
def test_a_count_of_zero_is_known_and_a_missing_one_is_not(path, events, wanted):
    assert (
        find_usage(path, b"".join(b"data: " + json.dumps({"usage": one}).encode() + b"\n\n" for one in events))
        == wanted
    )


@pytest.mark.parametrize("count", [0, 5, None])
def test_a_stream_without_a_count_has_as_many_tokens_as_events(count):
    usage = {} if count is None else {"usage": {"completion_tokens": count}}
    answer = AnswerStream(Mock(path="/v1/completions"), Mock(content_type=EVENT_STREAM), None, 0)
    answer._tail.add(b"data: " + json.dumps(usage).encode() + b"\n\n")
    answer._events = 2
    assert answer.usage == UsedTokens(None, 2 if count is None else count)


def test_retries_are_a_share_of_requests_once_what_was_saved_is_used_up():
    budget = RetryBudget(0.0)
    assert sum(budget.take(0.0) for _ in range(5000)) == SAVED_RETRIES
    for _ in range(1000):
        budget.request_came(0.0)
    assert sum(budget.take(0.0) for _ in range(1000)) == pytest.approx(1000 * RETRIES_PER_REQUEST, abs=1)
    assert sum(budget.take(2.0) for _ in range(1000)) == pytest.approx(2 * RETRIES_PER_SECOND, abs=1)


def test_time_and_requests_save_up_no_more_than_the_bound():
    budget = RetryBudget(0.0)
    for _ in range(100_000):
        budget.request_came(0.0)
    assert sum(budget.take(1e6) for _ in range(5000)) == SAVED_RETRIES


@pytest.mark.system
async def test_what_moves_continues_and_what_stands_still_ends():
    async with StallTimer(0.02) as timer:
        timer.moved(60)
        await asyncio.sleep(0.1)
    with pytest.raises(TimeoutError):
        async with StallTimer(0.02):
            await asyncio.Event().wait()


@pytest.mark.system
async def test_a_watch_that_is_left_ends_nothing_later():
    async with StallTimer(0.01):
        pass
    await asyncio.sleep(0.05)


async def test_a_watched_block_that_is_cancelled_is_no_timeout():
    async def watched():
        async with StallTimer(60):
            await asyncio.Event().wait()

    task = asyncio.create_task(watched())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
