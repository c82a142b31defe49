"""The egress cap: exact in every window, also if one wakes late; fair among connections; no wait is in vain."""

import threading
import time
from bisect import bisect_left
from itertools import accumulate, cycle, islice, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prfaas_transfer.limits import (
    BYTES_PER_MBIT,
    DEPTH_SECONDS,
    GRANT_SECONDS,
    MIN_GRANT_BYTES,
    EgressBucket,
    EgressCredit,
    Stop,
    StoppedError,
)

from ...waiting import PATIENCE_SECONDS, eventually

pytestmark = pytest.mark.system

WINDOW_SECONDS = 2.0


def sent_in_turns(credit: EgressCredit, flows: int, lateness_seconds: list[float], until_seconds: float):
    """Let flows that always want more take turns; return (time, flow, bytes) of every grant.

    A flow is woken when its credit is there, and runs as much later as the next of `lateness_seconds` says.
    """
    now, grants = 0.0, []
    while now < until_seconds:
        wanted = credit.grant_bytes(flows)
        delay = credit.delay_seconds(wanted, now)
        if delay:
            now += delay + lateness_seconds[len(grants) % len(lateness_seconds)]
            continue
        credit.take(wanted, now)
        grants.append((now, len(grants) % flows, wanted))
    return grants


@settings(max_examples=40, deadline=None)
@given(
    mbps=st.sampled_from([1, 7, 200, 1000, 25_000]),
    flows=st.sampled_from([1, 2, 9, 100]),
    lateness_seconds=st.lists(st.floats(0, DEPTH_SECONDS - GRANT_SECONDS - 0.001), min_size=1, max_size=20),
)
def test_a_window_of_two_seconds_is_exact_within_3_percent_however_late_threads_wake(mbps, flows, lateness_seconds):
    rate = mbps * BYTES_PER_MBIT
    late = [0.0] if mbps == 1 else lateness_seconds  # there a grant is most of the depth
    grants = sent_in_turns(EgressCredit(rate, 0.0), flows, late, 6.0)
    times, sums = [at for at, _, _ in grants], [0, *accumulate(count for _, _, count in grants)]
    for first in range(bisect_left(times, 3.9)):
        last = bisect_left(times, times[first] + WINDOW_SECONDS)
        assert sums[last] - sums[first] == pytest.approx(rate * WINDOW_SECONDS, rel=0.03)
    shares = [sum(count for _, flow, count in grants if flow == one) for one in range(flows)]
    assert max(shares) - min(shares) <= grants[0][2]


def test_lateness_beyond_the_depth_is_lost_and_never_made_up_for():
    rate = 200 * BYTES_PER_MBIT
    grants = sent_in_turns(EgressCredit(rate, 0.0), 1, [0.2], 4.0)
    assert sum(count for _, _, count in grants) < 0.5 * rate * 4


def test_a_bucket_starts_empty_and_a_pause_saves_up_no_more_than_the_depth():
    credit = EgressCredit(1_000_000, 10.0)
    assert credit.level(10.0) == 0
    assert credit.level(1000.0) == credit.depth == 40_000
    credit.take(30_000, 1000.0)
    assert credit.level(1000.0) == 10_000
    assert credit.delay_seconds(20_000, 1000.0) == pytest.approx(0.01)


def test_without_a_cap_everything_is_granted_at_once():
    bucket = EgressBucket()
    assert (bucket.mbps, bucket.take(1 << 40, Stop())) == (None, 1 << 40)


class Connections:
    """Threads that take from a bucket until stopped, and what each was granted."""

    def __init__(self, bucket: EgressBucket, count: int, piece_bytes: int):
        self.stop = Stop()
        self.grants: list[tuple[int, int]] = []
        self._bucket, self._piece_bytes = bucket, piece_bytes
        self._threads = [threading.Thread(target=self._run, args=(number,), daemon=True) for number in range(count)]
        self.started = time.monotonic()
        for thread in self._threads:
            thread.start()

    def _run(self, number: int) -> None:
        try:
            while True:
                self.grants.append((number, self._bucket.take(self._piece_bytes, self.stop)))
        except StoppedError:
            pass

    def end(self) -> float:
        """Stop all; return the seconds they had."""
        self.stop.set()
        for thread in self._threads:
            thread.join(PATIENCE_SECONDS)
            assert not thread.is_alive()
        return time.monotonic() - self.started


def test_threads_together_never_get_more_than_the_cap_and_look_no_more_often_than_they_are_served(monkeypatch):
    looks = []
    real = EgressBucket._delay_seconds
    monkeypatch.setattr(EgressBucket, "_delay_seconds", lambda self, count: looks.append(1) or real(self, count))
    bucket = EgressBucket(80)
    connections = Connections(bucket, 6, 1 << 20)
    eventually(lambda: len(connections.grants) >= 40, "forty grants")
    seconds = connections.end()
    granted = sum(count for _, count in connections.grants)
    assert granted <= 80 * BYTES_PER_MBIT * (seconds + DEPTH_SECONDS)
    assert {number for number, _ in connections.grants} == set(range(6))
    assert len(looks) <= 4 * (len(connections.grants) + 6)


def test_turns_go_round(monkeypatch):
    """With all in line before the first is served, each is served once before any is served again."""
    bucket = EgressBucket(80)
    monkeypatch.setattr(EgressBucket, "_delay_seconds", lambda _self, _count: float("inf"))
    connections = Connections(bucket, 5, 1000)
    eventually(lambda: len(bucket._fifo) >= 5, "five wait")
    opened = threading.Semaphore(0)
    monkeypatch.setattr(
        EgressBucket, "_delay_seconds", lambda _self, _count: 0.0 if opened.acquire(blocking=False) else float("inf")
    )
    for served in range(1, 21):
        eventually(lambda: len(bucket._fifo) >= 5, "the one that was served has come back", poll=0.0005)
        opened.release()
        with bucket._fifo.lock:
            bucket._fifo.wake()
        eventually(lambda served=served: len(connections.grants) >= served, "one more is served", poll=0.0005)
    connections.end()
    order = [number for number, _ in connections.grants]
    assert sorted(order[:5]) == list(range(5))
    assert order == order[:5] * 4


@pytest.mark.parametrize("mbps", [None, 400])
def test_a_changed_cap_reaches_those_that_wait(monkeypatch, mbps):
    bucket = EgressBucket(1)
    real = EgressCredit.delay_seconds
    monkeypatch.setattr(
        EgressCredit,
        "delay_seconds",
        lambda self, count, now: real(self, count, now) if self.rate_per_second > BYTES_PER_MBIT else 1e6,
    )
    granted: list[int] = []
    threads = [
        threading.Thread(target=lambda: granted.append(bucket.take(9000, Stop())), daemon=True) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    eventually(lambda: len(bucket._fifo) >= 3, "three wait")
    bucket.set_mbps(1)  # no change: nothing happens
    assert not granted
    bucket.set_mbps(mbps)
    for thread in threads:
        thread.join(10)
    assert granted == [9000] * 3


def test_a_stopped_transfer_waits_no_longer_and_delays_no_other(monkeypatch):
    bucket, stop = EgressBucket(1), Stop()
    monkeypatch.setattr(EgressCredit, "delay_seconds", lambda _self, _count, _now: 1e6)
    ended: list[Exception] = []

    def wait_for(which: Stop) -> None:
        try:
            bucket.take(1000, which)
        except StoppedError as error:
            ended.append(error)

    other = Stop()
    threads = [threading.Thread(target=wait_for, args=(one,), daemon=True) for one in (stop, other, stop)]
    for thread in threads:
        thread.start()
    eventually(lambda: len(bucket._fifo) >= 3, "three wait")
    stop.set()
    threads[0].join(10)
    threads[2].join(10)
    assert (len(ended), len(bucket._fifo)) == (2, 1)
    with pytest.raises(StoppedError):
        bucket.take(1000, stop)
    bucket.set_mbps(None)
    threads[1].join(10)
    assert (len(ended), len(bucket._fifo)) == (2, 0)


class Granting(EgressBucket):
    """A bucket that makes these grants."""

    def __init__(self, grants: list[int]):
        super().__init__()
        self._grants = cycle(grants)

    def take(self, count_bytes: int, stop: Stop) -> int:
        return 0 if stop.is_set else min(count_bytes, next(self._grants))


@given(sizes=st.lists(st.integers(0, 9), max_size=8), grants=st.lists(st.integers(1, 9), min_size=1))
def test_portions_are_the_parts_in_order_as_granted_and_no_copies(sizes, grants):
    whole = bytes(range(sum(sizes)))
    edges = [0, *accumulate(sizes)]
    parts = [memoryview(whole)[start:end] for start, end in pairwise(edges)]
    portions = list(Granting(grants).portions(parts, Stop()))
    assert b"".join(b"".join(portion) for portion in portions) == whole
    assert all(view.obj is whole for portion in portions for view in portion)
    sizes = [sum(map(len, portion)) for portion in portions]
    assert sizes[:-1] == list(islice(cycle(grants), len(sizes)))[:-1]


def test_without_a_cap_there_is_one_portion_and_of_nothing_none():
    bucket = EgressBucket()
    assert list(bucket.portions([b"ab", b"", b"c"], Stop())) == [[b"ab", b"c"]]
    assert list(bucket.portions([b""], Stop())) == []


@pytest.mark.parametrize(("mbps", "in_line"), [(200, 256), (1000, 100), (8, 1)])
def test_all_have_a_turn_within_a_quarter_of_a_second(mbps, in_line):
    credit = EgressCredit(mbps * BYTES_PER_MBIT, 0.0)
    assert in_line * credit.grant_bytes(in_line) <= 0.25 * credit.rate_per_second
    assert MIN_GRANT_BYTES <= credit.grant_bytes(in_line) <= credit.grant_bytes(1) <= credit.depth


def test_the_limits_of_the_cap_hold_for_the_smallest_and_the_largest():
    assert MIN_GRANT_BYTES <= EgressCredit(BYTES_PER_MBIT, 0).depth <= 0.05 * BYTES_PER_MBIT
    assert EgressCredit(100_000 * BYTES_PER_MBIT, 0).depth == DEPTH_SECONDS * 100_000 * BYTES_PER_MBIT
