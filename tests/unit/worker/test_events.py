"""Cache events as readers see them that know only what is documented: msgpack without types, plain HTTP, plain ZMQ.

The front is the real one, HTTP and all; the engine is the other end of its socket, played here.
"""

import asyncio
import http.client
import itertools
import struct
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import closing
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio

from prfaas.wire.kvevents import MEDIUM_DEVICE, AllBlocksCleared, BlockRemoved, ByteBlock, attention_stored
from prfaas_worker.front import kv_event_stream
from prfaas_worker.front.kv_events import KvEventPublisher, TopicLog
from prfaas_worker.options import parse

pytestmark = pytest.mark.system


class Reader:
    """Reads the stream with the standard library and a msgpack decoder: the ten lines that a reader needs."""

    def __init__(self, host: str, query: str = ""):
        self._connection = http.client.HTTPConnection(host, 8000, timeout=10)
        self._connection.request("GET", f"/v1/kv-events{query}")
        self._answer = self._connection.getresponse()
        assert self._answer.status == 200

    def __iter__(self) -> Iterator[tuple[str, int, Any]]:
        while length := self._answer.read(4):
            topic, seq, payload = msgspec.msgpack.decode(self._answer.read(struct.unpack("!I", length)[0]))
            yield topic, seq, msgspec.msgpack.decode(payload)

    def take(self, count: int) -> list[tuple[str, int, Any]]:
        return list(itertools.islice(self, count))

    def close(self) -> None:
        self._answer.close()
        self._connection.close()


async def read(front: Any, query: str, count: int) -> list[tuple[str, int, Any]]:
    """Connect again, read so many frames and leave."""

    def run() -> list[tuple[str, int, Any]]:
        reader = Reader(front.host, query)
        try:
            return reader.take(count)
        finally:
            reader.close()

    return await asyncio.to_thread(run)


async def test_a_stream_names_its_instance_and_then_what_happened(front):
    await front.change_cache(attention_stored([b"h" * 32], None, list(range(64)), "mla_attention"))
    await front.change_cache(BlockRemoved([b"h" * 32], MEDIUM_DEVICE, 0), AllBlocksCleared())
    hello, first, second = await read(front, "", 3)
    topic = "kv@pod-1@tiny"
    assert hello[0] == "prfaas.hello"
    assert hello[2]["topics"][topic] == {"first_seq": 0, "next_seq": 2}
    assert (hello[2]["instance"], hello[2]["model"]) == ("pod-1", "tiny")
    assert (first[0], first[1], second[0], second[1]) == (topic, 0, topic, 1)
    tokens = list(range(64))
    assert first[2][1:] == [
        [["BlockStored", [b"h" * 32], None, tokens, 64, None, "GPU", None, None, 0, "mla_attention", None]],
        0,
    ]
    assert second[2][1] == [["BlockRemoved", [b"h" * 32], "GPU", 0], ["AllBlocksCleared"]]


async def test_a_reader_that_was_away_continues_where_it_was(front):
    for n in range(5):
        await front.change_cache(BlockRemoved([n]))
    frames = await read(front, "", 3)
    epoch, (_, last, _) = frames[0][2]["epoch"], frames[-1]
    await front.change_cache(BlockRemoved([5]))
    _, *rest = await read(front, f"?from={last + 1}&epoch={epoch}", 5)
    assert [seq for _, seq, _ in rest] == [2, 3, 4, 5]
    assert [batch[1][0][1] for _, _, batch in rest] == [[2], [3], [4], [5]]


async def test_events_arrive_as_they_happen_and_silence_is_reported(front, monkeypatch):
    monkeypatch.setattr(kv_event_stream, "ALIVE_SECONDS", 0.05)
    reader = await asyncio.to_thread(Reader, front.host)
    assert [topic for topic, _, _ in await asyncio.to_thread(reader.take, 3)] == [
        "prfaas.hello",
        "prfaas.alive",
        "prfaas.alive",
    ]
    await front.change_cache(AllBlocksCleared())
    found = await asyncio.to_thread(lambda: next(frame for frame in reader if frame[0] != "prfaas.alive"))
    assert found[1] == 0
    reader.close()


async def test_a_reader_too_slow_for_the_log_is_cut_off_with_a_reason_and_slows_no_other(front):
    big = b"x" * 100_000
    reader = await asyncio.to_thread(Reader, front.host)
    for _ in range(800):  # 80 MB: beyond what the sockets and the log hold together
        await front.change_cache(BlockRemoved([big]))
    frames = await asyncio.to_thread(list, reader)
    *_, gap, end = frames
    assert (gap[0], end[0], end[2]) == ("prfaas.gap", "prfaas.end", {"reason": "overrun"})
    seqs = [seq for topic, seq, _ in frames if topic.startswith("kv@")]
    assert seqs == list(range(gap[2]["from_seq"]))
    assert gap[2]["to_seq"] == front.serving.events.kv.first_seq
    reader.close()


async def test_the_end_of_the_worker_ends_the_stream(front):
    reader = await asyncio.to_thread(Reader, front.host)
    await asyncio.to_thread(reader.take, 1)
    front.serving.events.close()
    assert [(topic, body) for topic, _, body in await asyncio.to_thread(list, reader)] == [
        ("prfaas.end", {"reason": "shutdown"})
    ]
    reader.close()


async def test_a_reader_that_leaves_while_it_is_written_to_is_no_error(front, monkeypatch, caplog):
    async def left(*_: Any) -> None:
        raise ConnectionResetError("Cannot write to closing transport")

    monkeypatch.setattr(kv_event_stream, "_send", left)
    reader, writer = await asyncio.open_connection(front.host, 8000)
    writer.write(b"GET /v1/kv-events HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
    assert await reader.read()
    writer.close()
    assert [record.message for record in caplog.records if record.levelname == "ERROR"] == []


async def test_the_byte_map_has_its_own_numbers(front):
    await front.change_cache(AllBlocksCleared())
    front.serving.events.learn([ByteBlock(1, b"a" * 32, 64), ByteBlock(2, b"b" * 32, 128)])
    _, kv, learned = await read(front, "", 3)
    assert (kv[0], kv[1]) == ("kv@pod-1@tiny", 0)
    assert (learned[0], learned[1]) == ("bytes@pod-1@tiny", 0)
    assert learned[2]["blocks"][1] == {"byte_hash": 2, "block_hash": b"b" * 32, "tokens": 128}


def test_byte_blocks_are_published_once_while_the_log_has_them():
    events = KvEventPublisher(parse(["--model-source", "x", "--model-name", "m"]))
    events.byte_map = TopicLog("bytes", kept_batches=2)
    first, second, third = (ByteBlock(n, b"h" * 32, 64) for n in range(3))
    for blocks in ([first], [first, second], [second]):
        events.learn(blocks)
    assert events.byte_map.next_seq == 2
    events.learn([third])  # pushes the first batch out
    events.learn([second])
    assert events.byte_map.next_seq == 3
    events.learn([first])
    assert events.byte_map.next_seq == 4


@pytest.mark.parametrize("query", ["?from=-1", "?from=x", "?bytes_from=1.5", "?from=" + "9" * 30])
async def test_a_number_that_is_none_is_refused(front, query):
    def status() -> int:
        with closing(http.client.HTTPConnection(front.host, 8000, timeout=10)) as connection:
            connection.request("GET", f"/v1/kv-events{query}")
            return connection.getresponse().status

    assert await asyncio.to_thread(status) == 400


@pytest.fixture
async def sockets() -> AsyncIterator[Callable[[int], zmq.asyncio.Socket]]:
    context = zmq.asyncio.Context()
    opened = []

    def new_socket(kind: int) -> zmq.asyncio.Socket:
        opened.append(context.socket(kind))
        return opened[-1]

    yield new_socket
    context.destroy(linger=0)


async def subscribe(sockets: Callable[[int], zmq.asyncio.Socket], front: Any, topic: str) -> zmq.asyncio.Socket:
    subscriber = sockets(zmq.SUB)
    subscriber.connect(f"tcp://{front.host}:{front.events_port}")
    subscriber.setsockopt_string(zmq.SUBSCRIBE, topic)
    while True:  # until the subscription has arrived
        await front.change_cache(AllBlocksCleared())
        if await subscriber.poll(20):
            return subscriber


async def next_frames(receiver: zmq.asyncio.Socket) -> list[bytes]:
    return await asyncio.wait_for(receiver.recv_multipart(), 30)


async def test_zmq_subscribers_get_vllms_frames(front, sockets):
    subscriber = await subscribe(sockets, front, "kv@")
    front.serving.events.learn([ByteBlock(1, b"a" * 32, 64)])  # another topic: not requested
    await front.change_cache(BlockRemoved([b"h"], MEDIUM_DEVICE, 0))
    seqs = []
    while True:
        topic, seq, payload = await next_frames(subscriber)
        assert topic == b"kv@pod-1@tiny"
        seqs.append(int.from_bytes(seq, "big"))
        ts, events, rank = msgspec.msgpack.decode(payload)
        assert (ts > 1.6e9, rank) == (True, 0)
        if events != [["AllBlocksCleared"]]:
            break
    assert events == [["BlockRemoved", [b"h"], "GPU", 0]]
    assert seqs == list(range(seqs[0], front.serving.events.kv.next_seq))


async def test_zmq_replays_what_a_subscriber_missed(front, sockets):
    subscriber = await subscribe(sockets, front, "kv@")
    *_, last, _ = await next_frames(subscriber)
    subscriber.close()
    for n in range(3):
        await front.change_cache(BlockRemoved([n]))
    asker = sockets(zmq.DEALER)
    asker.connect(f"tcp://{front.host}:{front.events_port + 1}")
    wanted = int.from_bytes(last, "big") + 1
    await asker.send_multipart([b"", wanted.to_bytes(8, "big")])
    answers = []
    while (answer := await next_frames(asker))[-1]:
        answers.append(answer)
    assert answer == [b"", b"\xff" * 8, b""]
    assert [int.from_bytes(seq, "big") for _, seq, _ in answers] == list(range(wanted, wanted + len(answers)))
    assert [msgspec.msgpack.decode(body)[1] for _, _, body in answers[-3:]] == [
        [["BlockRemoved", [n], None, None]] for n in range(3)
    ]


async def test_a_damaged_request_for_a_replay_harms_nothing(front, sockets):
    await front.change_cache(AllBlocksCleared())
    asker = sockets(zmq.DEALER)
    asker.connect(f"tcp://{front.host}:{front.events_port + 1}")
    await asker.send_multipart([b"", b"short"])
    await asker.send_multipart([b"", bytes(8)])
    assert (await next_frames(asker))[1] == bytes(8)
