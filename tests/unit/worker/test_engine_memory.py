"""The step loop and its memory: what is shared, who gives way, and that whatever ends leaves nothing behind."""

from typing import Any

import pytest
import torch

from prfaas.errors import PeerError
from prfaas.wire.engine import Cancel, Failed, Sampling
from prfaas_worker.cache.memory import CacheMemory
from prfaas_worker.engine import schedule
from prfaas_worker.engine.loop import Gauges
from prfaas_worker.models import load_model
from prfaas_worker.models.base import Batch, Model

from .engine_bench import Bench, alone, fetched


@pytest.fixture(scope="module")
def model() -> Model:
    return load_model("builtin:kimi-linear-tiny", 1)[0]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of 64 tokens, so that short prompts take several steps."""
    monkeypatch.setitem(schedule.BUDGETS, "mixed", schedule.Budgets(64, 64))


@pytest.mark.parametrize("steps", [0, 1, 2, 5])
def test_a_cancelled_request_frees_its_memory_wherever_it_stands(model: Model, steps: int):
    bench = Bench(model)
    handle = bench.ask(b"z" * 100, choices=2, max_tokens=50)
    for _ in range(steps):
        bench.step()
    bench.engine.inbox.put(Cancel(handle))
    bench.step()
    bench.assert_nothing_is_held()
    assert bench.engine.requests.get(handle) is None
    assert bench.engine.gauges[:4] == Gauges()[:4]
    said = len(bench.said)
    bench.run()
    assert len(bench.said) == said


def test_sequences_that_outgrow_the_memory_take_turns_and_say_what_they_would_alone(model: Model):
    """Three streams of up to four pages on five: the last one gives way, and comes back as if nothing had been."""
    bench = Bench(model, num_pages=5)
    prompts = [b"def f(x):\n    return", b"import os\n\n\nclass A", b"for i in range("]
    handles = [bench.ask(prompt, max_tokens=220, sampling=Sampling(1.0, 1.0, 0, 5)) for prompt in prompts]
    bench.run()
    assert bench.engine.gauges.preemptions > 0
    bench.assert_nothing_is_held()
    roomy = Bench(model)
    expected = [roomy.ask(prompt, max_tokens=220, sampling=Sampling(1.0, 1.0, 0, 5)) for prompt in prompts]
    roomy.run()
    assert roomy.engine.gauges.preemptions == 0
    for handle, other in zip(handles, expected, strict=True):
        assert bench.tokens(handle) == roomy.tokens(other)


def test_choices_share_their_prompts_pages(model: Model):
    bench = Bench(model)
    handle = bench.ask(b"x" * 200, choices=4, max_tokens=30, sampling=Sampling(1.0, 1.0, 0, 1))
    while not bench.tokens(handle, 3):
        bench.step()
    assert bench.engine.cache.stats().used_pages == 3 + 4
    bench.run()
    bench.assert_nothing_is_held()


def test_a_step_without_memory_fails_its_prompts_and_computes_its_decodes_anew(
    model: Model, monkeypatch: pytest.MonkeyPatch
):
    bench = Bench(model)
    stream = bench.ask(b"def f(", max_tokens=20)
    while len(bench.tokens(stream)) < 5:
        bench.step()
    real = model.forward

    def forward(batch: Batch, on_layer: Any = None) -> torch.Tensor:
        if batch.chunks:
            bench.memory.slots.fill_(7)  # what it leaves behind is undefined
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(batch, on_layer)

    monkeypatch.setattr(model, "forward", forward)
    refused = bench.ask(b"y" * 90)
    bench.step()
    bench.step()
    monkeypatch.undo()
    bench.run()
    (failed,) = [message for message in bench.said if isinstance(message, Failed)]
    assert (failed.handle, failed.status, failed.code) == (refused, 503, "overloaded")
    expected = alone(model, b"def f(", 20)
    cut = next((at for at, token in enumerate(expected) if token in model.eos_token_ids), 20)
    assert bench.tokens(stream) == expected[:cut]
    bench.assert_nothing_is_held()


def test_a_step_without_memory_ends_all_choices_of_a_prompt_in_it(model: Model, monkeypatch: pytest.MonkeyPatch):
    """One choice decodes beside another that has lost its memory and is computed anew."""
    bench = Bench(model)
    handle = bench.ask(b"def f(", choices=2, max_tokens=50)
    while not bench.tokens(handle, 1):
        bench.step()
    request = bench.engine.requests.get(handle)
    assert request is not None
    bench.engine._preempt(request.sequences[1])
    bench.engine.cache.reset()
    bench.step()  # admits it again; from the next step on it is a chunk

    def forward(batch: Batch, on_layer: Any = None) -> torch.Tensor:
        assert batch.chunks
        assert batch.decodes is not None
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(model, "forward", forward)
    bench.step()
    assert [type(message) for message in bench.said if message.handle == handle].count(Failed) == 1
    bench.assert_nothing_is_held()


class Parrot:
    """A model that computes nothing: it says token after token by chance."""

    def __init__(self, model: Model):
        self.layers, self.fingerprint, self.device = model.layers, model.fingerprint, model.device
        self.eos_token_ids, self.vocab_size = frozenset({1}), 264
        self.chance = torch.Generator().manual_seed(2)

    def bind(self, memory: CacheMemory) -> None:
        pass

    def forward(self, batch: Batch, _on_layer: Any = None) -> torch.Tensor:
        return torch.rand(batch.outputs, 264, generator=self.chance)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden


def test_ten_thousand_cancels_at_every_stage_leave_no_page_held(model: Model):
    """Requests of every kind are cancelled, whole or by choice, at any time while others go on."""
    parrot: Any = Parrot(model)
    bench = Bench(parrot, max_waiting=10_000, num_pages=48)
    chance = torch.Generator().manual_seed(1)

    def number(below: int) -> int:
        return int(torch.randint(below, (1,), generator=chance))

    cancelled, alive = 0, []
    while cancelled < 10_000:
        for _ in range(number(60)):
            remote = "http://127.0.0.1:1" if number(4) == 0 else ""
            fields = {"choices": 1 + number(3), "max_tokens": 1 + number(8), "prefill_url": remote}
            alive.append(bench.ask(b"q" * (1 + number(150)), **fields))
        for _ in range(number(3)):
            bench.engine.step(wait=False)
        for fetch in bench.fetches:
            fetch.on_end(PeerError("gone") if number(2) else fetched(parrot, fetch.sequence))
        bench.fetches.clear()
        for _ in range(len(alive) - 20):
            handle = alive.pop(number(len(alive)))
            bench.engine.inbox.put(Cancel(handle, number(3)) if number(5) == 0 else Cancel(handle))
            cancelled += 1
    for handle in alive:
        bench.engine.inbox.put(Cancel(handle))
    while list(bench.engine.requests):
        bench.step()
        for fetch in bench.fetches:
            fetch.on_end(PeerError("gone"))
        bench.fetches.clear()
    bench.assert_nothing_is_held()
