"""Proves that the gateway follows engines of others over real ZMQ sockets, places prompts of token ids by their blocks
and others by its own record, and that an engine that lies, dies or floods harms only itself.
"""

import asyncio
import hashlib
import socket
import struct
import threading
from collections.abc import AsyncIterator, Callable, Iterator

import pytest
from tests.waiting import PATIENCE_SECONDS, eventually_async

from prfaas import names
from prfaas.errors import ProtocolError, UnreachableError
from prfaas.wire import headers
from prfaas_gateway.kv import zmtp

from .fleet import Fleet
from .publisher import CLEARED, PORT, Engine, Publisher, Sglang, SglangMaps, Vllm, VllmMaps, pack

pytestmark = [pytest.mark.system, pytest.mark.usefixtures("_quick_pauses")]

BATCHES = "prfaas_gateway_kv_batches_total"
MINE = [n * 7 % 50_000 for n in range(960)]
THEIRS = [n * 11 % 50_000 + 1 for n in range(960)]


async def serve(fleet: Fleet, prompt: list[int] | str, times: int = 6) -> set[str]:
    """Return who served this prompt, in so many requests."""
    return {await fleet.ask(prompt, number) for number in range(times)}


@pytest.fixture
async def fleet(world) -> AsyncIterator[Fleet]:
    made = Fleet(world)
    yield made
    for one in made.publishers.values():
        await asyncio.to_thread(one.close)


@pytest.mark.parametrize("engine", [Vllm(), VllmMaps(), Sglang(), SglangMaps()], ids=lambda one: type(one).__name__)
async def test_a_prompt_of_token_ids_goes_where_its_blocks_are(fleet, engine: Engine):
    await fleet.start()
    fleet.publishers["d0"].publish(engine.batch(*engine.stored(MINE)))
    fleet.publishers["d1"].publish(engine.batch(*engine.stored(THEIRS)))
    await fleet.until(BATCHES, 2)
    assert await serve(fleet, THEIRS) == {"d1"}
    for _ in range(3):
        assert await serve(fleet, MINE) == {"d0"}
    assert await serve(fleet, [*MINE[:500], *THEIRS]) == {"d0"}
    assert await fleet.world.metric("prfaas_gateway_kv_matched_tokens_total") > 0
    fleet.publishers["d0"].publish(engine.batch(engine.removed(MINE)))
    await fleet.until(BATCHES, 3)
    assert await serve(fleet, MINE, 12) == {"d0", "d1"}, "what was evicted draws no request"


async def test_batches_from_before_and_those_that_got_lost_come_from_the_log(fleet):
    await fleet.start()
    engine, d1 = Vllm(), fleet.publishers["d1"]
    d1.publish(engine.batch(*engine.stored(THEIRS[:480])), is_lost=True)
    await fleet.until(BATCHES, 1)  # nothing more was published: silence made the gateway look
    d1.publish(engine.batch(*engine.stored(THEIRS, first=30)), is_lost=True)
    d1.publish(engine.batch(*engine.stored(MINE)))
    await fleet.until(BATCHES, 3)
    assert await serve(fleet, THEIRS) == {"d1"}
    assert await fleet.world.metric("prfaas_gateway_kv_gaps_total") <= 1
    assert max(d1.questions) <= 2


async def test_numbers_of_24_bytes_name_the_life_of_a_publisher(fleet):
    await fleet.start(life=b"a" * 16)
    engine, d0 = VllmMaps(), fleet.publishers["d0"]
    d0.publish(engine.batch(*engine.stored(THEIRS)), is_lost=True)
    await fleet.until(BATCHES, 1)
    assert await serve(fleet, THEIRS) == {"d0"}
    await asyncio.to_thread(d0.close)
    fleet.publishers["d0"] = Publisher(d0.host, life=b"b" * 16)
    fleet.publishers["d0"].publish(engine.batch(*engine.stored(MINE)), is_lost=True)
    await fleet.until(BATCHES, 2)
    assert await serve(fleet, MINE) == {"d0"}
    assert await serve(fleet, THEIRS, 12) == {"d0", "d1"}


async def test_without_a_log_what_is_published_still_counts(fleet):
    await fleet.start(has_log=False)
    engine = Sglang()
    await fleet.until('prfaas_gateway_kv_instances{state="followed"}', 2)

    async def is_heard() -> bool:  # a subscription takes a moment to arrive
        fleet.publishers["d1"].publish(engine.batch(*engine.stored(THEIRS)))
        return await fleet.world.metric(BATCHES) > 0

    await eventually_async(is_heard, "the gateway hears what is published", poll=0.05)
    assert await serve(fleet, THEIRS) == {"d1"}


async def test_text_goes_where_this_gateway_sent_it_until_the_engine_clears_its_cache(fleet):
    await fleet.start()
    await fleet.until('prfaas_gateway_kv_instances{state="followed"}', 2)
    text = "".join(hashlib.sha256(bytes([n])).hexdigest() for n in range(60))
    first = await fleet.ask(text, 0)
    other = 1
    while await fleet.ask("short", other) == first:
        other += 1
    assert await fleet.ask(text, other) == first
    fleet.publishers[first].publish(Vllm().batch(*Vllm().stored(MINE)))
    await fleet.until(BATCHES, 1)
    assert await fleet.ask(text, other) == first
    fleet.publishers[first].publish(Vllm().batch(CLEARED, *Vllm().stored(MINE)))
    await fleet.until(BATCHES, 2)
    assert await fleet.ask(text, other) != first


@pytest.mark.parametrize(
    ("name", "engine", "instances"), [("sglang", Sglang(), 1), ("vllm-nixl", Vllm(), 2)], ids=["sglang", "control"]
)
async def test_under_a_salt_that_no_event_names_the_record_counts(fleet, name, engine: Engine, instances):
    """Of vLLM, which names salts, it is known that nobody has the prompt."""
    fleet.ranks = {"p0": 1, "p1": 1, "d0": 1} if name == "sglang" else fleet.ranks
    await fleet.start(name)
    for publisher in fleet.publishers.values():
        publisher.publish(engine.batch(*engine.stored(THEIRS)))
    await fleet.until(BATCHES, len(fleet.ranks))
    salted = {"model": "m", "prompt": MINE, "cache_salt": "s"}
    by = headers.PREFILL_INSTANCE if name == "sglang" else headers.DECODE_INSTANCE
    served = {(await fleet.post(salted, number)).headers[by] for number in range(12)}
    assert len(served) == instances


GARBAGE: dict[str, list[bytes]] = {
    "no number": [b"kv@x@m", b"7", b""],
    "one part": [b"kv@x@m"],
    "no msgpack": [b"kv", bytes(8), b"\xc1\xc1"],
    "another shape": [b"kv", bytes(8), pack({"ts": "x", "events": 7})],
    "an event that lacks its fields": [b"kv", bytes(8), pack([0.0, [["BlockStored"]]])],
    "deep nesting": [b"kv", bytes(8), b"\x91" * 100_000],
    "too large": [b"kv", bytes(8), bytes(9 << 20)],
    "too many parts": [b"kv"] * 50,
    "tokens that are none": [b"kv", bytes(8), Vllm().batch(*Vllm().stored([-1] * 16))],
}


@pytest.mark.parametrize("what", GARBAGE)
async def test_garbage_ends_the_connection_and_harms_no_other_instance(fleet, what, caplog):
    caplog.set_level("INFO", "prfaas_gateway.kv.manager")
    await fleet.start()
    engine = Vllm()
    fleet.publishers["d1"].publish(engine.batch(*engine.stored(THEIRS)))
    await fleet.until(BATCHES, 1)
    await fleet.until('prfaas_gateway_kv_instances{state="followed"}', 2)

    def is_cut_off() -> bool:
        fleet.publishers["d0"].send(GARBAGE[what])
        return any("instance d0: its cache is lost" in one.message for one in caplog.records)

    await eventually_async(is_cut_off, "the gateway cuts off the publisher of garbage", poll=0.05)
    assert not [one for one in caplog.records if one.levelname == "ERROR"], "a bug was met"
    await fleet.until('prfaas_gateway_kv_instances{state="followed"}', 2)
    fleet.publishers["d0"].publish(engine.batch(*engine.stored(MINE)))
    await fleet.until(BATCHES, 2)
    assert await serve(fleet, MINE) == {"d0"}
    assert await serve(fleet, THEIRS) == {"d1"}


GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
READY = b"\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x03PUB"


class Hostile:
    """A peer that says what it likes."""

    def __init__(self, *frames: bytes):
        self.server = socket.create_server(("127.0.0.1", 0))
        self.port = self.server.getsockname()[1]
        self._thread = threading.Thread(target=self._speak, args=(frames,), daemon=True)
        self._thread.start()

    def _speak(self, frames: tuple[bytes, ...]) -> None:
        peer, _ = self.server.accept()
        with peer:
            try:
                for one in frames:
                    peer.sendall(one)
                while peer.recv(1 << 16):
                    pass
            except OSError:
                pass

    def close(self) -> None:
        self.server.close()
        self._thread.join(PATIENCE_SECONDS)
        assert not self._thread.is_alive()


@pytest.fixture
def hostile() -> Iterator[Callable[..., Hostile]]:
    made: list[Hostile] = []

    def make(*frames: bytes) -> Hostile:
        made.append(Hostile(*frames))
        return made[-1]

    yield make
    for one in made:
        one.close()


async def receive(port: int) -> list[bytes] | None:
    async with zmtp.connected("127.0.0.1", port, "SUB") as connection:
        return await connection.receive(PATIENCE_SECONDS)


@pytest.mark.parametrize(
    ("frames", "why"),
    [
        ((b"HTTP/1.1 400 Bad Request\r\n" + bytes(64),), "does not speak ZMTP 3"),
        ((GREETING.replace(b"NULL\0", b"CURVE"),), "the mechanism"),
        ((GREETING, b"\x04\x0a\x05ERROR\x03no."), "refused a SUB socket"),
        ((GREETING, b"\x06" + struct.pack(">Q", 1 << 40)), "a message of over"),
        ((GREETING, READY, b"\x02" + struct.pack(">Q", 1 << 63)), "a message of over"),
        ((GREETING, READY, b"\x80\x00"), "the flags 0x80"),
        ((GREETING, READY, b"\x04\x05\x04PING" * 1000), "commands"),
        ((GREETING, READY, b"\x01\x00" * 1000), "parts"),
    ],
)
async def test_a_peer_that_does_not_speak_zmtp_is_refused_with_the_reason(hostile, frames, why):
    with pytest.raises(ProtocolError, match=why):
        await receive(hostile(*frames).port)


async def test_stops_waiting_for_a_peer_that_stops_in_the_middle_or_is_absent(hostile, monkeypatch):
    monkeypatch.setattr(zmtp, "MESSAGE_SECONDS", 0.1)
    monkeypatch.setattr(zmtp, "CONNECT_SECONDS", 0.1)
    for frames in ((GREETING[:20],), (GREETING, READY, b"\x00\x05ab"), (GREETING, READY, b"\x01\x01a")):
        with pytest.raises(UnreachableError):
            await receive(hostile(*frames).port)
    free = socket.create_server(("127.0.0.1", 0))
    port = free.getsockname()[1]
    free.close()
    with pytest.raises(UnreachableError):
        await receive(port)


async def test_heart_beats_between_messages_are_skipped(hostile):
    assert await receive(hostile(GREETING, READY, b"\x04\x05\x04PING" * 3 + b"\x01\x01a\x00\x01b").port) == [b"a", b"b"]


def test_the_operator_and_the_gateway_mean_the_same_ports():
    assert (names.KV_EVENTS_PORT, names.kv_log_port(ranks=1)) == (PORT, PORT + 1)
