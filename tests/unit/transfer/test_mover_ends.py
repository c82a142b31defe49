"""Movers that die, hang or are closed: their transfers end, another one starts, and nothing of them stays."""

import gc
import os
import signal
import socket
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from prfaas.ports import free_ports
from prfaas_transfer.mover.messages import CopyPart, EndedFetch

from ...waiting import PATIENCE_SECONDS, assert_freed, eventually
from .engines import SPANS, Engine

pytestmark = [pytest.mark.system, pytest.mark.usefixtures("_patience")]


def test_without_a_mover_offers_and_fetches_end_at_once(start_engine):
    engine = start_engine()
    engine.mover.close()
    eventually(lambda: not engine.mover.is_running, "the mover ended")
    message = engine.announce()
    assert engine.take_ended_offer() == message.transfer_id
    engine.fetch(engine, message)
    assert engine.take_ended_fetch() == EndedFetch(message.key, "the mover is not running")


def test_a_mover_outlives_the_signals_of_its_engines_group(start_engine):
    engine = start_engine()
    pid = engine.mover_pid
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(pid, number)
    engine.fetch(engine, engine.offer())
    assert engine.take_ended_fetch().reason == ""
    assert engine.mover_pid == pid


def test_a_mover_that_is_closed_while_it_starts_again_does_not_stay(start_engine, monkeypatch):
    engine = start_engine()
    start = engine.mover._start
    started: list[Any] = []

    def start_and_close(*ends: socket.socket) -> Any:
        started.append(start(*ends))
        engine.mover.close()
        return started[0]

    monkeypatch.setattr(engine.mover, "_start", start_and_close)
    os.kill(engine.mover_pid, signal.SIGKILL)
    eventually(lambda: bool(started), "another mover starts")
    eventually(lambda: started[0].poll() is not None, "the mover that was started ended")


def test_a_mover_that_dies_ends_its_transfers_and_another_serves_the_next(pair):
    source, destination = pair
    message = source.announce()
    destination.fetch(source, message)
    time.sleep(0.3)
    os.kill(source.mover_pid, signal.SIGKILL)
    assert source.take_ended_offer() == message.transfer_id
    assert destination.take_ended_fetch().reason

    def is_served() -> bool:
        destination.fetch(source, source.offer())
        return not destination.take_ended_fetch().reason

    eventually(is_served, "another mover serves")


class HeldUp:
    """A lock that stops its thread, when it has left it for the first time, until the mover was killed and replaced."""

    def __init__(self, engine: Engine):
        self._engine, self._lock = engine, engine.mover._lock
        self._thread = threading.get_ident()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()
        if threading.get_ident() == self._thread:
            self._thread = 0
            former = self._engine.mover_pid
            os.kill(former, signal.SIGKILL)
            eventually(
                lambda: self._engine.mover_pid != former and self._engine.mover.is_running, "another mover took over"
            )


def test_a_fetch_that_ended_with_its_mover_is_not_made_by_the_next(pair):
    """Its memory is another request's by then."""
    source, destination = pair
    message = source.offer()
    destination.mover._lock = HeldUp(destination)  # type: ignore[assignment]
    destination.fetch(source, message)
    destination.take_ended_fetch()
    landed = len(destination.landed)
    time.sleep(2)
    assert len(destination.landed) == landed


def test_no_copy_outlives_its_mover(start_engine, monkeypatch):
    """It would answer the next mover's copy of the same number, or write into that one's slot."""
    source, destination = start_engine(copy_threads=2), start_engine()
    copies, may_end, load = threading.Event(), threading.Event(), source.load

    def load_late(*copy: Any) -> None:
        copies.set()
        may_end.wait(PATIENCE_SECONDS)
        load(*copy)

    monkeypatch.setattr(source, "load", load_late)
    killed, message = source.mover_pid, source.offer()
    destination.fetch(source, message)
    assert copies.wait(PATIENCE_SECONDS)
    os.kill(killed, signal.SIGKILL)
    assert destination.take_ended_fetch().reason
    time.sleep(1.5)  # another mover starts after a second
    assert (source.mover_pid, source.ended_offers.empty()) == (killed, True)
    may_end.set()
    assert source.take_ended_offer() == message.transfer_id
    eventually(lambda: source.mover_pid != killed and source.mover.is_running, "another mover took over")


def test_a_mover_that_hangs_is_replaced_before_its_engine_hangs_too(start_engine, monkeypatch):
    monkeypatch.setattr("prfaas_transfer.mover.client.SEND_SECONDS", 1)
    source = start_engine()
    hanging = source.mover_pid
    os.kill(hanging, signal.SIGSTOP)
    message = source.announce()

    def send_much() -> None:
        for _ in range(3000):
            source.mover.put(message.transfer_id, [CopyPart(1, 1, *SPANS[0])])

    step = threading.Thread(target=send_much, daemon=True)
    step.start()
    step.join(PATIENCE_SECONDS)
    is_held_up = step.is_alive()
    with suppress(ProcessLookupError):
        os.kill(hanging, signal.SIGCONT)
    assert not is_held_up, "a step waits for a mover that reads nothing"
    assert source.take_ended_offer() == message.transfer_id
    eventually(lambda: source.mover_pid != hanging, "another mover took over")


def test_a_mover_that_cannot_start_again_says_why_and_is_tried_until_it_can(start_engine, caplog):
    (port,) = free_ports(1)
    os.kill(start_engine(data_port=port).mover_pid, signal.SIGKILL)
    eventually(lambda: "the mover ended with status -9; another one starts in 1 s" in caplog.text, "its end is logged")
    with socket.create_server(("127.0.0.1", port)):
        reason = f"the mover cannot start: data port 127.0.0.1:{port} cannot be opened"
        eventually(lambda: reason in caplog.text, "the reason is logged")

    def is_back() -> bool:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port)):
            return True
        return False

    eventually(is_back, "the port is open again")


def count_descriptors() -> int:
    """Count what this process has open for movers: sockets to a mover, and memory that it shares with one."""
    found = 0
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # closed meanwhile
            found += "memfd:prfaas-mover" in str(descriptor.readlink()) or is_unix_pair(int(descriptor.name))
    return found


def is_unix_pair(descriptor: int) -> bool:
    if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
        return False
    with socket.socket(fileno=os.dup(descriptor)) as found:
        return found.family == socket.AF_UNIX


def test_a_mover_that_has_no_memory_left_to_report_ends_with_a_sentence(start_engine, monkeypatch):
    monkeypatch.setattr("prfaas_transfer.mover.client.MOVER_PROGRAM", (str(Path(__file__).with_name("starved.py")),))
    source, destination = start_engine(), start_engine()
    message = source.offer()
    destination.fetch(source, message)
    reason = "the mover had no memory left: raise the container's limit, or give transfers less of it"
    assert destination.take_ended_fetch() == EndedFetch(message.key, reason)


@contextmanager
def full_disk() -> Iterator[None]:
    """Have processes that start meanwhile write their log where there is no room."""
    own = os.dup(2)
    try:
        with Path("/dev/full").open("wb") as full:
            os.dup2(full.fileno(), 2)
        yield
    finally:
        os.dup2(own, 2)
        os.close(own)


def test_movers_whose_log_has_no_room_carry_caches_and_report_as_always(start_engine):
    with full_disk():
        with pytest.raises(OSError, match="No space left"):
            os.write(2, b"the control")
        source, destination = start_engine(), start_engine()
    for _ in range(2):
        destination.fetch(source, source.announce(), token="wrong")
        assert "no prefill" in destination.take_ended_fetch().reason
        destination.fetch(source, source.offer())
        assert destination.take_ended_fetch().reason == ""
    assert destination.landed


def test_a_closed_mover_leaves_no_process_thread_or_descriptor():
    def is_followed() -> bool:
        return any(thread.name == "mover" for thread in threading.enumerate())

    assert_freed(lambda: not is_followed(), "no thread follows a mover of other tests")
    gc.collect()
    before = count_descriptors()
    engine = Engine()
    process = engine.mover._process
    assert process is not None
    assert is_followed()
    assert count_descriptors() == before + 4, "the sockets, the memory, and the one that its mapping keeps"
    engine.mover.close()
    assert_freed(lambda: not is_followed(), "no thread follows a mover")
    assert process.poll() is not None
    assert count_descriptors() == before + 1, "what the mapping keeps ends with the client"
    del engine
    gc.collect()
    assert_freed(lambda: count_descriptors() <= before, "what the mapping kept is closed")
