"""The engine's orderly end: a restart finds what was cached, and no disk holds the end up for long."""

import threading
from pathlib import Path
from typing import Any

import pytest

from prfaas.wire.engine import Started
from prfaas_worker.cache.tiers import Tiers
from prfaas_worker.engine import loop
from prfaas_worker.models import load_model
from prfaas_worker.models.base import Model

from .engine_bench import Bench

pytestmark = pytest.mark.system

PROMPT = b"def parse(text):\n" * 20


@pytest.fixture(scope="module")
def model() -> Model:
    return load_model("builtin:kimi-linear-tiny", 1)[0]


def disk(model: Model, folder: Path) -> Tiers:
    return Tiers(model.fingerprint, disk_directory=folder, disk_bytes=1 << 24)


def cached_tokens(bench: Bench) -> int:
    """What a prompt finds in the cache."""
    handle = bench.ask(PROMPT, max_tokens=2)
    while not any(isinstance(message, Started) for message in bench.said):
        bench.engine.step(wait=False)
    bench.run()
    (found,) = [m.cached_tokens for m in bench.said if isinstance(m, Started) and m.handle == handle]
    return found


def running(bench: Bench) -> threading.Thread:
    thread = threading.Thread(target=bench.engine.run, daemon=True)
    thread.start()
    return thread


def test_a_restart_after_an_orderly_end_finds_what_the_device_had(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(loop, "LOAD_SECONDS", 60.0)
    tiers = disk(model, tmp_path)
    bench = Bench(model, tiers=tiers)
    assert cached_tokens(bench) == 0
    thread = running(bench)
    assert bench.engine.end(20.0)
    thread.join(20.0)
    assert not thread.is_alive()
    tiers.close()
    tiers = disk(model, tmp_path)
    assert cached_tokens(Bench(model, tiers=tiers)) == 320
    tiers.close()


@pytest.mark.parametrize("tiers", [None, Tiers("ab" * 32, host_bytes=1 << 20)])
def test_without_a_disk_the_end_is_at_once(model: Model, tiers: Tiers | None):
    bench = Bench(model, tiers=tiers)
    thread = running(bench)
    assert bench.engine.end(20.0)
    thread.join(20.0)


class SlowDisk:
    """A disk that takes one entry, and then waits for the test."""

    def __init__(self, tiers: Tiers, monkeypatch: pytest.MonkeyPatch):
        self.taken = 0
        self.reached, self.go_on = threading.Event(), threading.Event()
        self._real = tiers.disk.write_now
        monkeypatch.setattr(tiers.disk, "write_now", self._keep)

    def _keep(self, *given: Any) -> bool:
        if self.taken:
            self.reached.set()
            assert self.go_on.wait(20.0)
        self.taken += 1
        return self._real(*given)


def test_an_end_is_cut_short_by_another(model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(loop, "_LAST_STEP_SECONDS", 0.0)
    tiers = disk(model, tmp_path)
    bench = Bench(model, tiers=tiers)
    cached_tokens(bench)
    slow, thread = SlowDisk(tiers, monkeypatch), running(bench)
    first = threading.Thread(target=bench.engine.end, args=(1000.0,), daemon=True)
    first.start()
    assert slow.reached.wait(20.0)
    assert not bench.engine.end(0.0)
    slow.go_on.set()
    thread.join(20.0)
    first.join(20.0)
    assert not first.is_alive()
    assert slow.taken == 2
    assert bench.engine.cache.stats().disk_bytes > 0
    tiers.close()


def test_a_disk_that_hangs_is_not_waited_for(model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(loop, "_LAST_STEP_SECONDS", 0.0)
    tiers = disk(model, tmp_path)
    bench = Bench(model, tiers=tiers)
    cached_tokens(bench)
    slow, thread = SlowDisk(tiers, monkeypatch), running(bench)
    assert not bench.engine.end(0.2)
    slow.go_on.set()
    thread.join(20.0)
    tiers.close()
