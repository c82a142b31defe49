"""The prefix index: what a block costs in time and memory among ten million, what a look-up takes, and what it finds.

    prfaas bench kvindex [--blocks N]

Blocks come in chains of 200, as events bring them, half of a chain an event, into the trees of ten instances; memory is
what the process grew by. A look-up asks one instance for a prompt of 200 byte blocks, that are hashed already, with
attention rows in all and a state at the end; the rival is a dict of sets that is probed block by block. For engines of
others the blocks of a prompt of 256k token ids are hashed, 16 a block; the rival hashes the same bytes as a text's.

Of the published conversation trace every prompt is placed by `prfaas.routing` on one of eight instances, each with a
cache of 64 GB at the 48B model's sizes and 10,000 tokens a second of prefill. The figure is the tokens that those
instances find, over those that they find when the router knows their caches instead of asking the index by bytes. The
trace names prompts in pieces of 512 tokens, of 4 bytes each here; states lie at the last whole piece and where prompts
branch. PRFAAS_TRACE names its file, which is expected at ../shared/traces/mooncake_conversation.jsonl otherwise.
"""

import gc
import hashlib
import heapq
import os
import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Annotated

import typer
from benchmarks.report import Figure, run

from prfaas.kvindex.byte_maps import NO_BLOCK
from prfaas.kvindex.bytes import BYTE_BLOCK, ByteChain, TokenChain
from prfaas.kvindex.canonical import TOKEN_BYTES as ID_BYTES
from prfaas.kvindex.index import InstanceIndex, PrefixIndex
from prfaas.kvindex.keys import key_of, keys_of
from prfaas.names import HUB
from prfaas.routing.decide import decide
from prfaas.routing.facts import Refusal, RoutingFacts, RoutingRule
from prfaas.simulate.arrivals import MOONCAKE_BLOCK_TOKENS, read_trace
from prfaas.simulate.request import Arrival
from prfaas.wire.routes import Instance, LinkWatermarks, RoutingTable, Threshold

TREES = 10
CHAIN, EVENT = 200, 100
LOOK_UPS = 2000
IDS, BLOCK_IDS, PROMPTS = 1 << 18, 16, 20
INSTANCES = 8
CACHE_BYTES = 64 * 10**9
TOKEN_BYTES, STATE_BYTES = 8_064, 43_417_600
PREFILL_TOKENS_PER_SECOND = 10_000
DECODE_SECONDS = 0.02
PIECE_BYTES = 4 * MOONCAKE_BLOCK_TOKENS
BLOCKS = MOONCAKE_BLOCK_TOKENS // 64
TRACE = "../shared/traces/mooncake_conversation.jsonl"


def rss_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def per(count: int, work: Callable[[], object]) -> float:
    """Return the processor's microseconds for one of `count`."""
    began = time.process_time()
    work()
    return (time.process_time() - began) / count * 1e6


def names(count: int) -> list[bytes]:
    raw = os.urandom(32 * count)
    return [raw[at : at + 32] for at in range(0, len(raw), 32)]


def filled(blocks: int) -> tuple[list[InstanceIndex], float, float]:
    """Fill the trees; returns them, microseconds a block, and bytes a block."""
    gc.collect()
    before, spent = rss_bytes(), 0.0
    trees = [InstanceIndex(blocks, 1 << 20) for _ in range(TREES)]
    for number in range(blocks // CHAIN):
        chain, tree = names(CHAIN), trees[number % TREES].tree
        began = time.process_time()
        parent = None
        for at in range(0, CHAIN, EVENT):
            keys = keys_of(chain[at : at + EVENT])
            tree.store(keys, parent, False, 0)
            parent = keys[-1]
        spent += time.process_time() - began
    count = sum(len(one.tree) for one in trees)
    assert count == blocks // CHAIN * CHAIN
    return trees, spent / count * 1e6, (rss_bytes() - before) / count


def look_up_us(index: InstanceIndex) -> tuple[float, float]:
    """Return what a look-up takes, and a linear one in a dict of sets."""
    blocks, data = names(CHAIN), os.urandom(BYTE_BLOCK * CHAIN)
    keys, chain = [key_of(name) for name in blocks], ByteChain(b"root", data)
    index.tree.store(keys, None, False, 0)
    index.tree.store([keys[-1]], keys[-2], True, 0)
    index.bytes.learn(chain.all(), keys)
    assert index.match(chain, index.bytes) == 64 * CHAIN
    holders = {name: {"a"} for name in blocks} | {name: {"b"} for name in names(1_000_000)}

    def linear() -> int:
        return next((at for at, name in enumerate(blocks) if "a" not in holders[name]), CHAIN)

    ours = per(LOOK_UPS, lambda: [index.match(chain, index.bytes) for _ in range(LOOK_UPS)])
    return ours, per(LOOK_UPS, lambda: [linear() for _ in range(LOOK_UPS)])


def hash_us() -> tuple[float, float]:
    """Return what a block of token ids takes to be hashed, and one of as many bytes of text."""
    data, size = os.urandom(ID_BYTES * IDS), ID_BYTES * BLOCK_IDS
    blocks = PROMPTS * IDS // BLOCK_IDS
    ours = per(blocks, lambda: [TokenChain("salt", data, size).all() for _ in range(PROMPTS)])
    return ours, per(blocks, lambda: [ByteChain(b"root", data, size).all() for _ in range(PROMPTS)])


class Cache:
    """The cache of one instance, of pieces of the trace, which tells an index of every change."""

    def __init__(self, index: InstanceIndex):
        self._index = index
        self._used: OrderedDict[tuple[str, int], None] = OrderedDict()
        self._bytes = {"rows": MOONCAKE_BLOCK_TOKENS * TOKEN_BYTES, "state": STATE_BYTES}
        self._held = 0
        self.free_seconds = 0.0
        """When the prefills placed here are done."""

    def match(self, pieces: tuple[int, ...]) -> int:
        rows = self._rows(pieces)
        return MOONCAKE_BLOCK_TOKENS * next(
            (n for n in range(rows, 0, -1) if ("state", pieces[n - 1]) in self._used), 0
        )

    def _rows(self, pieces: tuple[int, ...]) -> int:
        return next((at for at, piece in enumerate(pieces) if ("rows", piece) not in self._used), len(pieces))

    def insert(self, pieces: tuple[int, ...]) -> None:
        branch = self._rows(pieces)
        for at in range(len(pieces), 0, -1):
            if at in (len(pieces), branch) or ("state", pieces[at - 1]) in self._used:
                self._touch("state", pieces[at - 1])
            self._touch("rows", pieces[at - 1])
        parent = None
        for piece in pieces:
            self._index.tree.store(piece_keys(piece), parent, False, 0)
            parent = piece_keys(piece)[-1]
        for piece in (one for one in pieces if ("state", one) in self._used):
            last, end = piece_keys(piece)[-2:]
            self._index.tree.store([end], last, True, 0)
        while self._held > CACHE_BYTES:
            (kind, piece), _ = self._used.popitem(last=False)
            self._held -= self._bytes[kind]
            gone = piece_keys(piece)
            self._index.tree.remove(reversed(gone) if kind == "rows" else gone[-1:], kind == "state", 0)

    def _touch(self, kind: str, piece: int) -> None:
        if (kind, piece) in self._used:
            self._used.move_to_end((kind, piece))
        else:
            self._used[kind, piece] = None
            self._held += self._bytes[kind]


@cache
def piece_keys(piece: int) -> list[int]:
    """Keys of a piece's blocks. A piece's name stands for all before it, as a block's does."""
    return [key_of(hashlib.sha256(f"{piece}/{at}".encode()).digest()) for at in range(BLOCKS)]


@cache
def piece_bytes(piece: int) -> bytes:
    return hashlib.shake_128(str(piece).encode()).digest(PIECE_BYTES)


def teach(index: InstanceIndex, chain: ByteChain, pieces: tuple[int, ...]) -> None:
    """Say what a worker says of a prompt: behind each byte block lie the whole blocks but one token."""
    keys = [key for piece in pieces for key in piece_keys(piece)]
    blocks = [(at * BYTE_BLOCK // 4 - 1) // 64 for at in range(1, len(chain) + 1)]
    index.bytes.learn(chain.all(), [keys[min(n, len(keys)) - 1] if n and keys else NO_BLOCK for n in blocks])


class World:
    """Eight instances with caches, and what is in flight there."""

    def __init__(self) -> None:
        self.names = [f"d{n}" for n in range(INSTANCES)]
        self.index = PrefixIndex()
        self.index.set_instances(self.names)
        self.caches = {name: Cache(self.index[name]) for name in self.names}
        self.queued = dict.fromkeys(self.names, 0)
        self.in_flight = dict.fromkeys(self.names, 0)
        self._ends: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        instances = [Instance(name=name, pool="d", cluster=HUB, role="decode", url="http://d") for name in self.names]
        self._table = RoutingTable(
            policy="p",
            namespace="n",
            generation=1,
            model="m",
            on_offload_failure="PrefillLocally",
            threshold=Threshold(mode="Disabled", tokens=1, min_tokens=1, max_tokens=1),
            watermarks=LinkWatermarks(high_percent=80, low_percent=50),
            short_interval_seconds=1,
            instances=tuple(instances),
        )
        self._rule = RoutingRule(threshold_tokens=1 << 40, bandwidth="Scarce", offload_clusters=frozenset())

    def at(self, seconds: float, then: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._ends, (seconds, self._count, then))

    def pass_time(self, seconds: float) -> None:
        while self._ends and self._ends[0][0] <= seconds:
            heapq.heappop(self._ends)[2]()

    def place(self, one: Arrival, cached_on: dict[str, int]) -> int:
        """Place a prompt by what is believed; returns the tokens that were found where it went."""
        facts = RoutingFacts(
            now_seconds=one.at_seconds,
            request_id=str(self._count),
            total_tokens=one.input_tokens,
            rule=self._rule,
            table=self._table,
            cached_on=cached_on,
            queued_tokens=self.queued,
            in_flight=self.in_flight,
        )
        route = decide(facts)
        if isinstance(route, Refusal):
            raise SystemExit("nothing can serve")
        name, pieces = route.decode.name, whole(one)
        home = self.caches[name]
        found = home.match(pieces[: (one.input_tokens - 1) // MOONCAKE_BLOCK_TOKENS])
        lacking = one.input_tokens - found
        home.free_seconds = max(home.free_seconds, one.at_seconds) + lacking / PREFILL_TOKENS_PER_SECOND
        self.queued[name] += lacking
        self.in_flight[name] += 1

        def prefilled() -> None:
            self.queued[name] -= lacking
            home.insert(pieces)

        def answered() -> None:
            self.in_flight[name] -= 1

        teach(self.index[name], chain_of(one), pieces)
        self.at(home.free_seconds, prefilled)
        self.at(home.free_seconds + DECODE_SECONDS * one.output_tokens, answered)
        return found


def whole(one: Arrival) -> tuple[int, ...]:
    return tuple(one.blocks[: one.input_tokens // MOONCAKE_BLOCK_TOKENS])


def chain_of(one: Arrival) -> ByteChain:
    return ByteChain(b"root", b"".join(map(piece_bytes, one.blocks))[: 4 * one.input_tokens])


def hit_tokens(arrivals: list[Arrival], believes: Callable[[World, Arrival], dict[str, int]]) -> int:
    world, found = World(), 0
    for one in arrivals:
        world.pass_time(one.at_seconds)
        found += world.place(one, believes(world, one))
    return found


def by_index(world: World, one: Arrival) -> dict[str, int]:
    return world.index.match(chain_of(one), world.names, [])


def all_knowing(world: World, one: Arrival) -> dict[str, int]:
    pieces = whole(one)[: (one.input_tokens - 1) // MOONCAKE_BLOCK_TOKENS]
    return {name: home.match(pieces) for name, home in world.caches.items()}


def nothing(_world: World, _one: Arrival) -> dict[str, int]:
    return {}


def load_trace() -> list[Arrival]:
    path = Path(os.environ.get("PRFAAS_TRACE", Path(__file__).resolve().parents[1] / TRACE))
    if not path.is_file():
        sys.exit(f"there is no trace at {path}: put mooncake_conversation.jsonl there, or name it in PRFAAS_TRACE")
    return read_trace(path.name, path.read_text().splitlines())


def figures(blocks: Annotated[int, typer.Option(help="Blocks in the index.")] = 10_000_000) -> Iterator[Figure]:
    trees, insert_us, block_bytes = filled(blocks)
    among = f"among {blocks / 1e6:g} M blocks"
    yield Figure(name=f"insert, {among}", value=insert_us, unit="us a block", reach=2.0)
    yield Figure(name=f"memory, {among}", value=block_bytes, unit="bytes a block", reach=40.0)
    ours, linear = look_up_us(trees[0])
    yield Figure(
        name="look-up of 200 blocks", value=ours, unit="us", reach=20.0, rival="dict of sets", rival_value=linear
    )
    ours, text = hash_us()
    yield Figure(
        name="hashes of 256k token ids", value=ours, unit="us a block", reach=1.0, rival="of text", rival_value=text
    )
    trees.clear()
    arrivals = load_trace()
    most = hit_tokens(arrivals, all_knowing)
    found, spread = hit_tokens(arrivals, by_index), hit_tokens(arrivals, nothing)
    hit = "hit tokens, of an all-knowing router's"
    load = "load alone decides"
    yield Figure(
        name=hit, value=found / most, unit="", better="higher", reach=0.95, rival=load, rival_value=spread / most
    )


if __name__ == "__main__":
    run("kvindex", __doc__, figures)
