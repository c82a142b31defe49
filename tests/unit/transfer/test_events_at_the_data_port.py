"""A mover tells its engine's cache events at its data port, after its own death and beside transfers, too."""

import os
import signal
import socket
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest

from prfaas.wire.kvevents import AllBlocksCleared
from prfaas_transfer.events.engine_socket import tell_at
from prfaas_transfer.events.follow import MAX_REQUEST_BYTES
from prfaas_transfer.events.log import BatchLog

from ...event_reader import EventReader
from ...waiting import PATIENCE_SECONDS, eventually
from .engines import Engine
from .test_events import batch, learned
from .test_events_snapshot import stored

pytestmark = [pytest.mark.system, pytest.mark.usefixtures("_patience")]


def read(engine: Engine, count: int) -> list[tuple[str, int, Any]]:
    """Connect, read so many frames and leave."""
    with closing(EventReader("127.0.0.1", engine.mover.data_port)) as reader:
        return reader.take(count)


def hears(engine: Engine, next_seq: int) -> None:
    eventually(lambda: read(engine, 1)[0][2]["next_seq"] == next_seq, "the mover hears of all events")


def kill_mover(engine: Engine) -> None:
    died, port = engine.mover_pid, engine.mover.data_port
    os.kill(died, signal.SIGKILL)
    eventually(lambda: engine.mover_pid != died and engine.mover.data_port != port, "another mover begins")


def test_events_and_the_byte_map_are_told_beside_transfers(start_engine):
    source, destination = start_engine(), start_engine()
    source.mover.events.append("kv", batch(stored(0, 1)))
    source.mover.events.append("bytes", learned(1))
    hello, *found = read(source, 3)
    assert (hello[0], [frame[:2] for frame in found]) == ("prfaas.hello", [("kv", 0), ("bytes", 1)])
    with closing(EventReader("127.0.0.1", source.mover.data_port, "?from=2")) as reader:
        reader.take(1)
        destination.fetch(source, source.offer())
        assert destination.take_ended_fetch().reason == ""
        source.mover.events.append("kv", batch(AllBlocksCleared()))
        assert next(frame for frame in reader if frame[0] == "kv")[1] == 2


def test_the_next_mover_knows_what_the_dead_one_knew(start_engine):
    engine = start_engine()
    for at in range(3):
        engine.mover.events.append("kv", batch(stored(at, at + 1)))
    hears(engine, 3)
    ((_, _, before),) = read(engine, 1)
    kill_mover(engine)
    engine.mover.events.append("kv", batch(stored(3, 4)))
    hears(engine, 4)
    hello, *found = read(engine, 5)
    assert hello[2]["epoch"] != before["epoch"]
    assert [seq for _, seq, _ in found] == [0, 1, 2, 3]


def test_a_scheduler_in_another_process_is_heard_also_by_the_next_mover(start_engine, tmp_path: Path):
    path, log = tmp_path / "events", BatchLog()
    engine = start_engine(events_path=str(path))  # it may begin before the scheduler does
    log.append("kv", batch(stored(0, 1)))
    tell_at(str(path), log)
    assert path.stat().st_mode & 0o777 == 0o600, "nobody else may read what is cached"
    log.append("kv", batch(stored(1, 2)))
    hears(engine, 2)
    kill_mover(engine)
    hears(engine, 2)


def answer(port: int, request: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", port), PATIENCE_SECONDS) as sock:
        sock.sendall(request)
        data = b""
        while piece := sock.recv(1 << 16):
            data += piece
        return data


def test_other_paths_wrong_numbers_and_endless_requests_are_refused(start_engine):
    port = start_engine().mover.data_port
    assert answer(port, b"GET /metrics HTTP/1.1\r\n\r\n").startswith(b"HTTP/1.1 400 ")
    assert answer(port, b"GET /v1/kv-events?from=x HTTP/1.1\r\n\r\n").startswith(b"HTTP/1.1 400 ")
    with suppress(ConnectionError):  # with bytes unread the end is a reset
        assert answer(port, b"GET " + b"x" * (MAX_REQUEST_BYTES + 100)) == b""
