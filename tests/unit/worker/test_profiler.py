"""The worker's profile: measured within its time, refined by real prefills, published on request."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from prfaas.capacity.profile import prefill_seconds
from prfaas.errors import CapacityError
from prfaas.schedule import Budgets
from prfaas.wire.engine import Measured, Ready
from prfaas.wire.profile import Profile
from prfaas_worker.engine import assembly
from prfaas_worker.engine.profiler import Profiler, measure_steps
from prfaas_worker.engine.runner import prefill_seconds as prefill_through
from prfaas_worker.engine.runner import warm_up
from prfaas_worker.models import load_model
from prfaas_worker.models.base import Batch, Model
from prfaas_worker.options import Options

from .engine_bench import Bench

pytestmark = pytest.mark.system

TRUE = Profile(state_bytes=1000, token_bytes=10, fixed_seconds=0.01, token_seconds=1e-4, squared_seconds=1e-9)


class Machine:
    """A machine with its own clock, on which prefills take what TRUE says; the first one compiles something."""

    def __init__(self, first_seconds: float = 0.05) -> None:
        self.now, self.first_seconds = 0.0, first_seconds
        self.lengths: list[int] = []
        self.profiles: list[Profile] = []
        self.profiler = Profiler(1000, 10, self.profiles.append, clock=lambda: self.now)

    def prefill(self, tokens: int) -> float:
        seconds = prefill_seconds(TRUE, tokens) + (0 if self.lengths else self.first_seconds)
        self.lengths.append(tokens)
        self.now += seconds
        return seconds

    @property
    def error(self) -> float:
        """Largest relative error at lengths up to 16K."""
        lengths = [64, 500, 4096, 16384]
        return max(abs(prefill_seconds(self.profiles[-1], n) / prefill_seconds(TRUE, n) - 1) for n in lengths)


def test_publishes_sizes_before_anything_is_measured():
    assert Machine().profiles == [Profile(state_bytes=1000, token_bytes=10)]


@pytest.mark.parametrize("budget_seconds", [0.5, 2.0, 10.0])
def test_measuring_keeps_to_its_time_and_finds_the_curve(budget_seconds):
    machine = Machine()
    machine.profiler.measure(machine.prefill, budget_seconds, max_tokens=100_000)
    assert machine.now <= budget_seconds + 0.01
    assert machine.error < 0.05
    assert machine.profiles[-1].samples == (len(machine.lengths) - 1) / 3


@pytest.mark.parametrize("first_seconds", [0.05, 0.5, 60.0])
def test_what_the_first_prefill_takes_to_get_ready_costs_no_sample(first_seconds):
    machine = Machine(first_seconds)
    machine.profiler.measure(machine.prefill, 1.0, max_tokens=100_000)
    assert machine.profiles[-1].samples == 5
    assert machine.error < 0.05


class Steps:
    """A machine with its own clock, and memory for steps of so many tokens."""

    def __init__(self, fixed_seconds: float, token_seconds: float, most_tokens: int = 1 << 20):
        self.now, self.most_tokens = 0.0, most_tokens
        self.costs = fixed_seconds, token_seconds
        self.sizes: list[int] = []

    def run(self, tokens: int) -> float:
        if tokens > self.most_tokens:
            raise CapacityError("no memory left to compute this step")
        self.sizes.append(tokens)
        seconds = self.costs[0] + self.costs[1] * tokens
        self.now += seconds
        return seconds

    def measured(self, budget_seconds: float, max_tokens: int = 1 << 20) -> list[int]:
        return list(measure_steps(self.run, budget_seconds, max_tokens, lambda: self.now))


def test_steps_are_measured_until_larger_ones_are_no_quicker():
    assert Steps(0.004, 1e-4).measured(10.0) == [256, 512, 1024]
    assert Steps(0.02, 3e-6).measured(10.0)[-1] == 32_768


def test_steps_are_measured_as_far_as_time_memory_and_context_go():
    machine = Steps(0.02, 3e-6)
    assert machine.measured(0.3) == [256, 512, 1024]
    assert machine.now <= 0.3
    assert Steps(0.02, 3e-6, most_tokens=5000).measured(10.0)[-1] == 4096
    assert Steps(0.02, 3e-6).measured(10.0, max_tokens=1000) == [256, 512]
    assert Steps(0.02, 3e-6).measured(0.0) == []


def assembled(**chosen: Any) -> Any:
    """An engine that is made with these options, on the built-in model."""
    model, _ = load_model("builtin:kimi-linear-tiny", 1)
    outbox: Any = SimpleNamespace(put=lambda _: None)
    options = Options(model_source="", model_name="tiny", **chosen)
    engine, _ = assembly.assemble(model, options, outbox)
    return engine


def test_measures_the_length_of_steps_unless_it_is_set_or_there_is_no_time(monkeypatch, caplog):
    monkeypatch.setattr(assembly, "measure_steps", lambda *_: {512: 0.1, 1024: 0.1, 2048: 0.1, 4096: 0.1})
    monkeypatch.setattr(assembly, "step_tokens", lambda seconds: max(seconds, default=1024))
    with caplog.at_level(logging.INFO):
        assert assembled(profile_seconds=0.1).budgets["mixed"].step_tokens == 4096
    assert "a step computes up to 4096 tokens, 2048 of a prompt beside decodes" in caplog.messages
    assert assembled(profile_seconds=0.1, step_tokens=96).budgets["decode"] == Budgets(96, 12)
    monkeypatch.undo()
    assert assembled(profile_seconds=0.0, role="prefill").budgets["prefill"] == Budgets(2048, 2048)


def test_what_is_measured_is_the_work_of_many_experts(monkeypatch):
    model, _ = load_model("builtin:kimi-linear-tiny", 1)
    bench, seen = Bench(model), set[int]()
    real = model.forward
    monkeypatch.setattr(model, "forward", lambda batch, _: seen.update(batch.tokens.tolist()) or real(batch))
    prefill_through(bench.engine.runner, bench.engine.cache, 256, 512)
    assert len(seen) == model.vocab_size


def test_prefills_are_measured_in_the_steps_that_are_served(monkeypatch):
    chunks: list[int] = []
    monkeypatch.setattr(assembly, "prefill_seconds", lambda *values: chunks.append(values[2]) or 0.001)
    assembled(profile_seconds=0.1, step_tokens=96)
    assembled(profile_seconds=0.1, step_tokens=96, role="prefill")
    assert set(chunks) == {96, 192}


def kinds_of_steps(model: Model) -> list[str]:
    """Note what kind each step is that the model runs from now on."""
    kinds, real = [], model.forward

    def forward(batch: Batch, on_layer: Any = None) -> torch.Tensor:
        parts = ["chunk" if chunk.start == 0 else "chunk behind rows" for chunk in batch.chunks]
        if batch.decodes is not None:
            parts.append("decode" if len(batch.decodes.slots) == 1 else "decodes")
        kinds.append(" beside ".join(parts))
        return real(batch, on_layer)

    model.forward = forward
    return kinds


@pytest.mark.parametrize("slots", [1, 2, 8])
def test_every_kind_of_step_is_run_before_the_clock(slots):
    model, _ = load_model("builtin:kimi-linear-tiny", 1)
    bench, kinds = Bench(model, max_running=slots, slots=slots, num_pages=4), kinds_of_steps(model)
    warm_up(bench.engine.runner, bench.engine.cache, max_tokens=200)
    several = ["chunk", "decodes", "chunk behind rows beside decode"] if slots > 1 else []
    assert kinds == ["chunk", "chunk behind rows", "decode", *several]
    bench.assert_nothing_is_held()


def test_a_context_of_a_few_tokens_needs_no_warm_up():
    model, _ = load_model("builtin:kimi-linear-tiny", 1)
    bench = Bench(model, num_pages=2)
    warm_up(bench.engine.runner, bench.engine.cache, max_tokens=2)
    bench.assert_nothing_is_held()


def test_an_engine_is_warm_before_it_measures():
    model, _ = load_model("builtin:kimi-linear-tiny", 1)
    kinds = kinds_of_steps(model)
    options = Options(model_source="", model_name="tiny", profile_seconds=0.2)
    outbox: Any = SimpleNamespace(put=lambda _: None)
    assembly.assemble(model, options, outbox)
    assert kinds[:6] == ["chunk", "chunk behind rows", "decode", "chunk", "decodes", "chunk behind rows beside decode"]
    assert "chunk" in kinds[6:], "and then it measures"


def test_with_time_enough_all_lengths_are_measured_several_times_and_no_more():
    machine = Machine()
    machine.profiler.measure(machine.prefill, 1000.0, max_tokens=100_000)
    assert machine.lengths == [64] + [n for n in (64, 128, 256, 512, 1024, 2048, 4096) for _ in range(3)]


def test_two_of_three_slow_repetitions_change_nothing():
    machine = Machine()

    def disturbed(tokens: int) -> float:
        return machine.prefill(tokens) * (1 if len(machine.lengths) % 3 == 0 else 4)

    machine.profiler.measure(disturbed, 1.0, max_tokens=100_000)
    assert machine.error < 0.05


def test_no_prompt_is_longer_than_the_model_takes():
    machine = Machine()
    machine.profiler.measure(machine.prefill, 10.0, max_tokens=300)
    assert max(machine.lengths) == 256


@pytest.mark.parametrize(("budget_seconds", "max_tokens"), [(0.0, 4096), (1.0, 63)])
def test_nothing_is_measured_without_time_or_room(budget_seconds, max_tokens):
    machine = Machine()
    machine.profiler.measure(machine.prefill, budget_seconds, max_tokens)
    assert machine.lengths == []
    assert machine.profiles[-1].samples == 0


def test_too_little_time_even_for_one_sample_is_no_error():
    machine = Machine()
    machine.profiler.measure(machine.prefill, 0.001, max_tokens=4096)
    assert machine.profiles[-1].samples == 0


def test_real_prefills_teach_the_curve_which_is_published_once_a_second():
    machine = Machine()
    for n in range(100):
        tokens, start = 50 + 37 * n, 64 * (n % 7)
        machine.now += 0.1
        machine.profiler.observe(tokens, prefill_seconds(TRUE, tokens, start), start)
    assert machine.error < 0.05
    assert 9 <= len(machine.profiles) <= 12


def test_prefills_of_which_nearly_all_was_cached_say_nothing_of_others():
    machine = Machine()
    machine.profiler.measure(machine.prefill, 10.0, 4096)
    before = machine.profiler.profile
    for _ in range(50):
        machine.now += 1
        machine.profiler.observe(1, 0.0002, 4096)  # as long as a step of decodes
    assert machine.profiler.profile == before
    machine.profiler.observe(64, 0.0002, 4096)
    assert machine.profiler.profile != before, "control: of as many as were measured it learns"


async def test_the_profile_is_published(client, front):
    async with client.session.get(f"{front.url}/v1/profile") as answer:
        assert (answer.status, (await answer.json())["error"]["code"]) == (404, "no_profile")
    await front.say(Ready("f" * 64, "/model", 256, 1000, 9000), Measured(TRUE))
    await front.serving.engine.ready
    async with client.session.get(f"{front.url}/v1/profile") as answer:
        body = await answer.json()
    assert (body["model"], body["instance"], body["fingerprint"]) == ("tiny", "pod-1", "f" * 64)
    assert (body["state_bytes"], body["token_bytes"]) == (1000, 10)
    assert body["prefill"]["token_seconds"] == 1e-4
    shown = {point["tokens"]: point for point in body["curve"]}[1024]
    seconds = prefill_seconds(TRUE, 1024)
    assert shown["prefill_seconds"] == pytest.approx(seconds)
    assert shown["kv_bits_per_second"] == pytest.approx(8 * (1000 + 10 * 1024) / seconds)
