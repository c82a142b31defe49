"""What the benchmark of hardening counts: its inputs are many and always the same, and what it calls a crash, a gap, a
good answer or a recovery is one. In small it runs whole: no input crashes, and hostile members hold up no other one.
"""

import gc
import gzip
import logging
import zlib
from pathlib import Path

import pytest
from benchmarks.hardening.engine import watched
from benchmarks.hardening.fuzz import fuzzed, judge
from benchmarks.hardening.gaps import TICK_SECONDS, Gaps, Moment
from benchmarks.hardening.inputs import LONGEST_BYTES, WEIGHTS, Target, inputs
from benchmarks.hardening.load import Reply, beats
from benchmarks.hardening.members import REACH_MIB, faced
from benchmarks.hardening.overload import GOOD_SECONDS, goodput, is_good, is_refused_well, judged, recovery_seconds
from benchmarks.hardening.rotation import Load
from benchmarks.hardening.rotation import Reply as Rotated
from benchmarks.hardening.strangers import BODY_BYTES, HELD_BACK_BYTES, held_back
from benchmarks.hardening.target import Tracebacks

INPUTS = 2000


def test_a_seed_gives_the_same_inputs_of_every_kind_to_every_reader():
    found = list(inputs(500))
    assert found == list(inputs(500))
    assert found != list(inputs(500, seed=2))
    assert {one.kind for one in found} == WEIGHTS.keys()
    assert {one.target for one in found} == set(Target.__args__)
    assert max(len(one.raw) for one in found) < 3 * LONGEST_BYTES
    assert [one.number for one in found if not one.said] == [one.number for one in found if one.kind != "stream"]


@pytest.mark.parametrize(
    ("kind", "answer", "is_crash"),
    [
        ("body", b"HTTP/1.1 200 OK\r\n\r\n{}", False),
        ("body", b"HTTP/1.1 400 Bad Request\r\n\r\n{}", False),
        ("stream", b"HTTP/1.1 502 Bad Gateway\r\n\r\n{}", False),
        ("head", b"", False),
        ("body", b"", True),
        ("head", None, True),
        ("template", b"HTTP/1.1 500 Internal Server Error\r\n\r\n", True),
    ],
)
def test_a_crash_is_an_internal_error_or_no_whole_answer(kind: str, answer: bytes | None, is_crash: bool):
    assert bool(judge(kind, answer)) is is_crash


def test_a_gap_is_what_exceeds_the_tick_and_was_no_wait_for_a_core():
    gaps = Gaps()
    gaps.note(Moment(10.0), Moment(10.0 + TICK_SECONDS))
    assert gaps.longest.seconds == pytest.approx(0.0)
    gaps.note(Moment(20.0, 3.0, 1.0, 2.0, 0.5), Moment(20.07 + TICK_SECONDS, 3.0, 1.01, 2.06, 0.5))
    gaps.note(Moment(30.0, 3.0), Moment(31.0, 3.97))
    assert (gaps.longest.seconds, gaps.longest.at) == (pytest.approx(0.07), 20.0)
    assert str(gaps.longest).startswith("70 ms, in which the loop's thread computed for 10 ms, all threads for 60, and")


def test_the_search_for_garbage_is_counted_beside_other_work():
    gaps, before = Gaps(), Moment(0.0)
    gc.callbacks.append(gaps.note_garbage)
    try:
        gc.collect(0)
        before = gaps.now()
        sum(range(100_000))
        after = gaps.now()
    finally:
        gc.callbacks.remove(gaps.note_garbage)
    assert 0 < before.garbage_seconds <= before.loop_seconds
    assert after.garbage_seconds == before.garbage_seconds
    assert after.loop_seconds > before.loop_seconds


def test_a_step_of_an_engine_that_is_the_longest_is_written_down(tmp_path: Path):
    file = tmp_path / "seconds"
    step = watched(lambda _loop, *, wait: bool(sum(range(200_000 if wait else 1))), file)
    assert step(None, wait=True)
    longest = file.read_text()
    assert not step(None, wait=False)
    assert float(longest) > 0
    assert file.read_text() == longest


def test_tracebacks_are_counted_and_one_of_a_kind_is_kept():
    seen = Tracebacks()
    logger = logging.Logger("fuzzed")
    logger.addHandler(seen)
    logger.warning("a request is refused")
    assert seen.count == 0
    for divisor in (0, 0.0):
        try:
            1 / divisor
        except ZeroDivisionError:
            logger.exception("surprise")
    assert (seen.count, len(seen.kinds)) == (2, 1)


def test_strangers_hold_back_the_end_of_a_body_that_is_small_only_while_it_is_packed():
    plain, packed = held_back(packed=False), held_back(packed=True)
    head, _, sent = plain.partition(b"\r\n\r\n")
    assert (b"Content-Length: %d" % BODY_BYTES in head, len(sent)) == (True, BODY_BYTES - HELD_BACK_BYTES)
    assert len(packed) < 20_000
    unpacked = zlib.decompressobj(wbits=31).decompress(packed.partition(b"\r\n\r\n")[2])
    assert len(unpacked) > BODY_BYTES - 1000
    with pytest.raises(EOFError):
        gzip.decompress(packed.partition(b"\r\n\r\n")[2])


SERVED, LATE = Reply(1.0, 0.5, 200, ""), Reply(12.5, GOOD_SECONDS + 0.5, 200, "")
REFUSED, LOST = Reply(14.0, 0.1, 429, "3"), Reply(11.0, 0.1, 0, "")


def test_an_answer_is_good_in_time_and_a_refusal_if_it_says_when_to_come_again():
    assert [is_good(one) for one in (SERVED, LATE, REFUSED, LOST)] == [True, False, False, False]
    others = (REFUSED._replace(status=503), REFUSED._replace(retry_after=""), LOST)
    assert [is_refused_well(one) for one in (REFUSED, *others)] == [True, False, False, False]
    assert goodput([SERVED, SERVED, LATE, REFUSED], 4.0) == 0.5
    assert goodput([SERVED, SERVED._replace(due_seconds=3.6)], 4.0) == 0.25, "it comes after four seconds"


def test_a_recovery_lasts_until_the_last_request_that_was_not_served_well():
    assert recovery_seconds([SERVED, LOST, LATE, SERVED._replace(due_seconds=20.0)], 10.0) == 2.5
    assert recovery_seconds([SERVED, LOST], 11.5) == 0.0


def test_an_overload_has_no_figure_where_the_engines_machine_was_too_slow():
    slow, kept = (list(judged(1.0, {2: [SERVED]}, f"prfaas_emulation_too_slow {value}\n")) for value in (1, 0))
    assert [(one.value, one.reach) for one in slow] == [(1, 0)]
    assert kept[0].value == 0
    assert kept[1].name == "overload: peak goodput"
    assert kept[-1].name == "overload 2 x: until all is served again"


def test_requests_are_due_at_a_steady_rate_from_a_moment_on():
    assert beats(2.0, 2.0, 10.0) == [10.0, 10.5, 11.0, 11.5]


def test_a_request_is_lost_without_its_whole_answer_and_elsewhere_if_another_cluster_prefilled_it():
    load = Load("http://gateway")
    load.replies += [Rotated(True, True), Rotated(True, False), Rotated(False, False)]
    assert (load.taken(), load.taken()) == ((3, 1, 1), (0, 0, 0))


@pytest.mark.system
def test_no_input_crashes_gateway_or_worker():
    found = fuzzed(INPUTS)
    shown = [(one.number, one.kind, one.target, reason) for one, reason in found.crashes[:3]]
    assert (shown, found.seen.kinds, found.seen.tracebacks) == ([], [], 0)
    assert found.seen.longest_step_seconds > 0, "the step loop of an engine is in the fuzz"


@pytest.mark.system
def test_an_operator_serves_its_other_members_beside_hostile_ones():
    """That each change is applied at all: how soon is the benchmark's to say."""
    figures = {one.name.partition(": ")[2]: one for one in faced(3.0)}
    assert figures["calls to each, or more"].value > 0
    assert figures["the operator's peak memory over idle"].value <= REACH_MIB
