"""Pairs of real vLLM engines with prfaas's connector, and the answers that they must give."""

import random
import secrets
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from prfaas.ports import free_ports
from prfaas_transfer.leases import ANNOUNCED_SECONDS
from prfaas_vllm.scheduling import WHOLE_PAGES_FROM, goal_of

from ..waiting import PATIENCE_SECONDS, assert_freed, eventually
from .engines import Answer, Engine, EngineHost, Running, reference_of

TOKENS = 24
CONNECTOR = {
    "kv_connector": "PrfaasConnector",
    "kv_connector_module_path": "prfaas_vllm.connector",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
}
TRANSFERS = "__import__('vllm.distributed.kv_transfer', fromlist=['x']).get_kv_transfer_group()._transfers"
NO_OPTIONS: Mapping[str, Any] = {}


class Pair(NamedTuple):
    """A source and a destination; the source's egress cap is in a file."""

    source: Engine
    destination: Engine
    port: int
    egress: Path
    ranks: tuple[int, int] = (1, 1)

    def legs(self, tokens: int = 0, **other: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """Name a transfer; with `tokens` that of a prefix."""
        common = {
            "tokens": tokens,
            "transfer_id": secrets.token_hex(16),
            "epoch": secrets.randbits(48),
            "token": secrets.token_urlsafe(8),
        }
        where = {"host": "127.0.0.1", "port": self.port, "cluster": "", "ranks": self.ranks[0]} | other
        source = common | {"role": "source", "ranks": self.ranks[1]}
        return {"prfaas": source}, {"prfaas": common | where | {"role": "destination"}}

    def offload(self, ids: list[int], tokens: int = TOKENS, **other: Any) -> tuple[Running, Running]:
        """Send both legs at once."""
        source, destination = self.legs(**other)
        return self.source.submit(ids, 1, source), self.destination.submit(ids, tokens, destination)

    def forget_prefixes(self) -> tuple[int, int]:
        """Empty both prefix caches; return the free pages of source and destination."""
        self.source.forget_prefixes()
        self.destination.forget_prefixes()
        return self.source.free_pages(), self.destination.free_pages()

    def assert_answered_fresh_and_after_hits(self, ids: list[int], tokens: list[int], logprobs: list[float]) -> None:
        """Fail unless an offloaded prompt is answered so to the last bit, and after hits on either side, and no memory
        is held afterwards."""
        free = self.forget_prefixes()
        goal = goal_of(len(ids), self.destination.page_tokens)
        for forgets in ((), (self.source,), (self.destination,), ()):
            for engine in forgets:
                engine.forget_prefixes()
            source, destination = self.offload(ids)
            answer = destination.result()
            source.result()
            assert (answer.tokens, answer.logprobs) == (tokens, logprobs)
            assert answer.cached_tokens == goal, "the rest came, or was here"
            self.assert_nothing_is_held(free)

    def offload_until_it_crosses(self, ids: list[int]) -> None:
        """Offload again and again, while a mover starts. Decline afterwards what did not cross: a source that heard of
        no destination would keep its memory for its lease."""
        lost: list[dict[str, Any]] = []

        def crosses() -> bool:
            self.destination.forget_prefixes()
            source, destination = self.legs()
            self.source.submit(ids, 1, source)
            if self.destination.generate(ids, TOKENS, destination).cached_tokens:
                return True
            lost.append(destination)
            return False

        eventually(crosses, "a cache crosses again")
        for destination in lost:
            self.destination.generate(ids, 1, destination)  # its own cache has all of it by now
        self.destination.forget_prefixes()

    def slow(self, mbps: int | None) -> None:
        """Cap the source's egress, and wait until its file was read, as it is every second; or lift the cap soon."""
        if mbps is None:
            self.egress.unlink(missing_ok=True)
        else:
            self.egress.write_text(str(mbps))
            time.sleep(1.5)

    def assert_nothing_is_held(self, free: tuple[int, int]) -> None:
        """Fail unless both sides' memory comes back: at once, or where the source hears nothing, after its lease. What
        never comes is a leak, and no question of time."""
        left = lambda: (self.source.free_pages(), self.destination.free_pages())  # noqa: E731
        assert_freed(
            lambda: left() == free,
            lambda: f"free pages of source and destination are {left()} for good, not {free}",
            ANNOUNCED_SECONDS + PATIENCE_SECONDS,
        )


def start(
    host: EngineHost, name: str, port: int, ranks: int = 1, options: Mapping[str, Any] = NO_OPTIONS, **extra: Any
) -> Engine:
    """Start an engine; `options` are those of `EngineHost.start`, the rest are of the connector."""
    config = CONNECTOR | {"kv_port": port, "kv_connector_extra_config": extra}
    return host.start(name, kv_transfer_config=config, **parallel(ranks), **options)


def parallel(ranks: int) -> dict[str, Any]:
    """Return an engine's options for so many tensor-parallel ranks; several are separate processes."""
    return {"tensor_parallel_size": ranks, "distributed_executor_backend": "mp"} if ranks > 1 else {}


@contextmanager
def started(
    host: EngineHost,
    folder: Path,
    *extras: dict[str, Any],
    ranks: tuple[int, int] = (1, 1),
    options: Mapping[str, Any] = NO_OPTIONS,
) -> Iterator[Pair]:
    """Start a source and a destination, each with its own settings beside the common ones, and its own ranks."""
    ports, egress = [first_of_free_ports(count) for count in ranks], folder / "mbps"
    engines: Sequence[Engine] = [
        start(host, f"{name}-{port}", port, count, options, egress_file=str(egress), **extra)
        for name, port, count, extra in zip("sd", ports, ranks, extras or ({}, {}), strict=True)
    ]
    yield Pair(engines[0].wait_ready(), engines[1].wait_ready(), ports[0], egress, ranks)
    for engine in engines:
        engine.stop()


@contextmanager
def spoiled(engine: Engine, kind: str, layer: int) -> Iterator[None]:
    """Have a source of one rank send zeros for a layer's state, or for the first rows of it, for a block."""
    is_part = "not part.tokens" if kind == "linear" else "part.tokens and part.start_token == 0"
    engine.evaluate(
        f"(lambda t: setattr(t, 'load', lambda transfer_id, part, room: room.__setitem__(slice(None), bytes(len(room)))"
        f" if {is_part} and part.layer == {layer} else type(t).load(t, transfer_id, part, room)))({TRANSFERS})"
    )
    yield
    engine.evaluate(f"delattr({TRANSFERS}, 'load')")


def first_of_free_ports(count: int) -> int:
    """Return the first of so many ports in a row on which nothing listens."""
    while True:
        first = free_ports(1)[0]
        with ExitStack() as held, suppress(OSError):
            for port in range(first, first + count):
                held.enter_context(socket.create_server(("127.0.0.1", port)))
            return first


def on_ranks(engine: Engine, expression: str) -> list[Any]:
    """Return an expression's value in each rank of an engine; `worker` is vLLM's, `transfers` the connector's."""
    function = f"lambda worker: (lambda transfers: {expression})({TRANSFERS})"
    return engine.evaluate(f"core.model_executor.collective_rpc({function})")


def prompt_of(length: int, seed: int = 0) -> list[int]:
    choose = random.Random(f"{length} {seed}")
    return [choose.randrange(256) for _ in range(length)]


def reference(engine: Engine, pair: Pair, length: int) -> tuple[list[int], list[int], list[float]]:
    """Return a prompt of `length` and what one engine says to it, where it computes the rest as the destination does.

    All but the last token: the last one is a decode step. Whole pages: the tail is a chunk after a cached prefix.
    """
    pages = (length - 1) // pair.destination.page_tokens
    if pages < WHOLE_PAGES_FROM:
        return tuple(reference_of(engine, prompt_of(length - 1), TOKENS))  # type: ignore[return-value]
    ids = prompt_of(length)
    engine.forget_prefixes()
    engine.generate(ids, 1)
    answer = engine.generate(ids, TOKENS)
    assert answer.cached_tokens == pages * pair.destination.page_tokens
    return ids, answer.tokens, answer.logprobs


def answer_alone(engine: Engine, ids: list[int], count: int = TOKENS) -> Answer:
    engine.forget_prefixes()
    return engine.generate(ids, count)
