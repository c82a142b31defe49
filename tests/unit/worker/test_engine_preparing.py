"""What a request waits for before it is admitted: prefixes from host memory and disk, and for how long at most."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from prfaas.wire.engine import Cancel, Started
from prfaas_worker.cache.tiers import Tiers
from prfaas_worker.engine import loop
from prfaas_worker.models import load_model
from prfaas_worker.models.base import Model

from ...waiting import eventually
from .engine_bench import Bench

pytestmark = pytest.mark.system

PROMPT = list(b"def parse(text):\n" * 20)


@pytest.fixture(scope="module")
def model() -> Model:
    return load_model("builtin:kimi-linear-tiny", 1)[0]


class TieredBench(Bench):
    """An engine on a small memory over tiers, run until a request has ended."""

    def __init__(self, model: Model, tiers: Tiers):
        super().__init__(model, max_running=2, max_waiting=8, num_pages=24, tiers=tiers)

    def ask_four(self, prompt: list[int]) -> int:
        return self.ask(prompt, max_tokens=4, ignore_eos=True)

    def until(self, done: Callable[[], Any]) -> None:
        def is_done() -> bool:
            self.engine.step(wait=False)
            return bool(done())

        done() or eventually(is_done, "the engine is so far", poll=0)

    def answer(self, prompt: list[int]) -> tuple[int, list[int]]:
        """Tokens that were cached, and tokens that were drawn."""
        handle = self.ask_four(prompt)
        self.engine.step(wait=False)
        self.until(lambda: self.engine.requests.get(handle) is None and self.engine.step(wait=False) is False)
        (started,) = [m for m in self.said if isinstance(m, Started) and m.handle == handle]
        return started.cached_tokens, self.tokens(handle)

    def push_out(self) -> None:
        """Use the whole pool for other prompts."""
        for n in range(6):
            self.answer([3 + (n * 31 + i * 7) % 250 for i in range(700)])


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_a_prefix_that_was_pushed_out_is_brought_back(model: Model, tmp_path: Path, tier: str):
    tiers = Tiers(
        model.fingerprint,
        host_bytes=1 << 24 if tier == "host" else 0,
        disk_directory=tmp_path if tier == "disk" else None,
        disk_bytes=1 << 24,
    )
    bench = TieredBench(model, tiers)
    cached, drawn = bench.answer(PROMPT)
    assert cached == 0
    bench.push_out()
    assert bench.answer(PROMPT) == (320, drawn)
    stats = bench.engine.cache.stats()
    assert (stats.host_hit_tokens, stats.disk_hit_tokens) == ((320, 0) if tier == "host" else (0, 320))
    tiers.close()


def test_a_new_process_finds_the_disk_of_the_last_one(model: Model, tmp_path: Path):
    first = Tiers(model.fingerprint, disk_directory=tmp_path, disk_bytes=1 << 24)
    bench = TieredBench(model, first)
    _, drawn = bench.answer(PROMPT)
    bench.push_out()
    first.close()
    second = Tiers(model.fingerprint, disk_directory=tmp_path, disk_bytes=1 << 24)
    assert TieredBench(model, second).answer(PROMPT) == (320, drawn)
    second.close()


class Stuck:
    """A disk that answers when the test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, tiers: Tiers):
        self.go = threading.Event()
        real = tiers.disk._read_all

        def read(names: Any) -> Any:
            assert self.go.wait(20)
            return real(names)

        monkeypatch.setattr(tiers.disk, "_read_all", read)


def test_a_stuck_disk_holds_a_request_up_for_its_moment_only_and_others_not_at_all(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    tiers = Tiers(model.fingerprint, disk_directory=tmp_path, disk_bytes=1 << 24)
    bench = TieredBench(model, tiers)
    _, drawn = bench.answer(PROMPT)
    bench.push_out()
    stuck = Stuck(monkeypatch, tiers)
    monkeypatch.setattr(loop, "LOAD_SECONDS", 0.3)
    slow = bench.ask_four(PROMPT)
    bench.engine.step(wait=False)
    assert bench.engine.stats.requests_waiting == 1
    cancelled = bench.ask_four(PROMPT)
    bench.engine.step(wait=False)
    bench.engine.inbox.put(Cancel(cancelled))
    assert len(bench.answer([7] * 40)[1]) == 4
    bench.until(lambda: bench.engine.requests.get(slow) is None)
    (started,) = [m for m in bench.said if isinstance(m, Started) and m.handle == slow]
    assert started.cached_tokens == 0
    assert bench.tokens(slow) == drawn
    stuck.go.set()
    bench.until(lambda: not list(bench.engine.requests))
    bench.engine.cache.check_integrity()
    tiers.close()


def test_a_read_that_ends_after_its_moment_changes_nothing(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    tiers = Tiers(model.fingerprint, disk_directory=tmp_path, disk_bytes=1 << 24)
    bench = TieredBench(model, tiers)
    _, drawn = bench.answer(PROMPT)
    bench.push_out()
    stuck = Stuck(monkeypatch, tiers)
    monkeypatch.setattr(loop, "LOAD_SECONDS", 0.0)
    late = bench.ask_four(PROMPT)
    bench.until(lambda: bench.tokens(late))
    stuck.go.set()
    eventually(lambda: not bench.engine.inbox.empty(), "the read has ended")
    bench.until(lambda: bench.engine.requests.get(late) is None)
    assert bench.tokens(late) == drawn
    bench.assert_nothing_is_held()
    tiers.close()
