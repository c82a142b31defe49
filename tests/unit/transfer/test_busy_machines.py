"""A machine that is busy for a second or two is no dead peer: neither a source whose engine is late, nor ourselves."""

import socket
import time
from collections.abc import Iterator
from functools import partial

import pytest

from prfaas.errors import UnreachableError
from prfaas_transfer import net
from prfaas_transfer.mover.messages import CopyPart
from prfaas_transfer.net import SOCKET_TIMEOUT_SECONDS, DataStream
from prfaas_transfer.pull import GONE_SECONDS

from ..worker.transfer_proxy import Proxy
from .engines import Engine

pytestmark = pytest.mark.system
BUSY_SECONDS = GONE_SECONDS + 1.5


class BusyEngine(Engine):
    """An engine whose first copy takes longer than a destination tolerates silence."""

    is_busy = True

    def load(self, key: str, part: CopyPart, room: memoryview) -> None:
        if self.is_busy:
            time.sleep(BUSY_SECONDS)
            self.is_busy = False
        super().load(key, part, room)


def test_a_source_shows_life_while_its_engine_has_no_time_to_copy():
    source, destination = BusyEngine(), Engine()
    message = source.offer()
    with Proxy(("127.0.0.1", source.mover.data_port)) as proxy:
        destination.fetch(source, message, port=proxy.address[1])
        assert destination.take_ended_fetch().reason == ""
        assert proxy.connections == 1, "the destination counted no connection as broken"
    assert not source.is_busy
    for one in (source, destination):
        one.mover.close()


class Clock:
    """A monotonic clock that a test moves."""

    def __init__(self) -> None:
        self.seconds = 100.0

    def monotonic(self) -> float:
        return self.seconds


class SilentStream(DataStream):
    """A connection on which nothing comes. Each wait takes as long as `waits` say."""

    def __init__(self, sock: socket.socket, clock: Clock, waits: list[float]):
        super().__init__(sock)
        self._clock, self._waits = clock, waits

    def _receive_some(self, *_: object) -> int | None:
        self._clock.seconds += self._waits.pop(0)
        return None

    def _send_some(self, _left: list[memoryview]) -> int:
        self._clock.seconds += self._waits.pop(0)
        return 0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(net, "time", clock)
    return clock


@pytest.fixture
def sock() -> Iterator[socket.socket]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours


def collect_silences(
    sock: socket.socket, clock: Clock, waits: list[float], *, sends: bool = False
) -> tuple[list[float], DataStream]:
    """Return the silence after each wait to receive, or to send, and the stream."""
    found: list[float] = []

    def note(silent_seconds: float) -> None:
        found.append(round(silent_seconds, 3))
        if not stream._waits:
            raise UnreachableError("enough")

    stream = SilentStream(sock, clock, list(waits))
    wait = partial(stream.send, [bytes(8)]) if sends else partial(stream.receive_into, bytearray(8))
    with pytest.raises(UnreachableError, match="enough"):
        wait(on_wait=note)
    return found, stream


def test_time_without_a_cpu_is_no_silence_of_the_peer(sock: socket.socket, clock: Clock):
    found, stream = collect_silences(sock, clock, [0.2, 3.0, 0.2, 5.0])
    assert found == [0.2, 0.6, 0.8, 1.2]
    assert stream.late_seconds == pytest.approx(2.6 + 4.6)
    assert clock.seconds - stream.heard_at == pytest.approx(1.2)


def test_nor_does_it_count_for_a_peer_that_takes_nothing(sock: socket.socket, clock: Clock):
    found, _ = collect_silences(sock, clock, [0.2, 3.0, 0.2, 5.0], sends=True)
    assert found == [0.2, 0.6, 0.8, 1.2]


def test_on_a_quiet_machine_all_silence_counts(sock: socket.socket, clock: Clock):
    found, stream = collect_silences(sock, clock, [SOCKET_TIMEOUT_SECONDS] * 6)
    assert found == [0.2, 0.4, 0.6, 0.8, 1.0, 1.2]
    assert stream.late_seconds == 0
