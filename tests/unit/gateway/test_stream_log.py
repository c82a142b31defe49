"""Proves what a log lets pass and keeps: never more than a client may have, never more memory than it says; and the
two small things beside it, the budget of retries and the watch over what moves.
"""

import asyncio
import json
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.errors import BadInputError
from prfaas.wire.resume import CUT, DONE, SentChoice, TokenEntry, comment, decode_resume, split_comments
from prfaas_gateway import stream
from prfaas_gateway.state import RETRIES_PER_REQUEST, RETRIES_PER_SECOND, SAVED_RETRIES, RetryBudget
from prfaas_gateway.stream import StallTimer, StreamLog

EVENT = b'data: {"choices": [{"text": "a;"}]}\n\n'


def name_tokens(choice: int, characters: int, token_ids: list[int], reason: str = "") -> bytes:
    return comment([TokenEntry(choice, characters, token_ids, reason)])


STREAM = b"".join(EVENT * (number % 3) + name_tokens(number % 2, number, [number]) for number in range(9)) + DONE


@given(st.lists(st.integers(1, len(STREAM) - 1), unique=True).map(sorted))
def test_whole_groups_pass_at_once_and_nothing_else(places: list[int]):
    log, passed = StreamLog("f", 3), b""
    for start, end in zip([0, *places], [*places, len(STREAM)], strict=True):
        passed += log.take(STREAM[start:end])
        cut = end if end == len(STREAM) else STREAM.rfind(CUT, 0, end) + len(CUT) if CUT in STREAM[:end] else 0
        assert passed == split_comments(STREAM[:cut])[0]
    assert passed == EVENT * 9 + DONE
    assert log.is_whole


def test_the_document_tells_what_passed_and_nothing_else():
    log = StreamLog("f", 3)
    log.take(EVENT + name_tokens(0, 1, [7]) + EVENT + name_tokens(1, 2, [8, 9], "stop") + EVENT)
    resume = decode_resume(log.document())
    assert (resume.fingerprint, resume.cached_tokens) == ("f", 3)
    assert resume.choices == {0: SentChoice([7], 1), 1: SentChoice([8, 9], 2, "stop")}
    assert not log.is_whole


def test_a_log_continues_with_the_next_worker():
    log = StreamLog("f", 0)
    log.take(EVENT + name_tokens(0, 1, [7]) + b"data: {half")
    log.worker_died()
    assert (log.error_event, log.is_refused) == (b"", False)
    log.take(EVENT + name_tokens(0, 2, [8]))
    assert decode_resume(log.document()).choices == {0: SentChoice([7, 8], 2)}


def test_keeps_only_the_comments_of_a_long_stream():
    log, group = StreamLog("f", 0), EVENT * 4 + name_tokens(0, 1, [70_000])
    tracemalloc.start()
    for _ in range(20_000):
        log.take(bytes(bytearray(group)))
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert size < 25 * 20_000 < len(group) * 20_000 / 5
    assert decode_resume(log.document()).choices[0].token_ids == [70_000] * 20_000


def test_a_worker_that_never_tells_of_tokens_counts_as_dead(monkeypatch):
    monkeypatch.setattr(stream, "MAX_HELD_BYTES", 1000)
    log = StreamLog("f", 0)
    for _ in range(1000 // len(EVENT)):
        assert log.take(EVENT) == b""
    with pytest.raises(BadInputError):
        log.take(EVENT)


def test_cannot_repeat_invalid_tokens():
    log = StreamLog("f", 0)
    log.take(b":\x1e0 5 99999999999;\n\n")
    assert not log.can_go_on


def test_cannot_repeat_more_than_a_document_may_hold(monkeypatch):
    log = StreamLog("f", 0)
    log.take(name_tokens(0, 5, list(range(100))))
    assert log.can_go_on
    monkeypatch.setattr(stream, "MAX_DOCUMENT_BYTES", 50)
    assert not log.can_go_on


@pytest.mark.parametrize(("kind", "for_all"), [("invalid_request_error", True), ("server_error", False)])
def test_the_error_that_a_worker_ended_with_is_kept(kind: str, for_all: bool):
    error = b"data: " + json.dumps({"error": {"type": kind, "message": "data: \n\n"}}).encode() + b"\n\n"
    log = StreamLog("f", 0)
    log.take(EVENT + name_tokens(0, 1, [7]) + EVENT + error)
    log.worker_died()
    assert (log.error_event, log.is_refused) == (EVENT + error, for_all)


@pytest.mark.parametrize(
    "held", [b"", b"data: {", b"data: 7\n\n", b'data: {"error": 7}\n\n', b"\xff\n\n", b"data: [[[["]
)
def test_what_is_no_error_event_is_not_kept(held: bytes):
    log = StreamLog("f", 0)
    log.take(held)
    log.worker_died()
    assert (log.error_event, log.is_refused) == (b"", False)


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
