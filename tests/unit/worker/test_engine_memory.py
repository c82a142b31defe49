"""The step loop and its memory: what is shared, what gives way, and that all that ends leaves nothing behind."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from prfaas.wire.engine import Failed, Sampling
from prfaas_worker.engine.runner import Runner
from prfaas_worker.models.base import Batch, Model

from .engine_bench import Bench, Parrot, generate

pytestmark = pytest.mark.usefixtures("small_chunks")


def test_sequences_that_outgrow_the_memory_take_turns_and_answer_as_if_alone(model: Model):
    """Three streams of up to four pages on five: the last one gives way, and comes back as if nothing had been."""
    bench = Bench(model, num_pages=5)
    prompts = [b"def f(x):\n    return", b"import os\n\n\nclass A", b"for i in range("]
    handles = [bench.ask(prompt, max_tokens=220, sampling=Sampling(1.0, 1.0, 0, 5)) for prompt in prompts]
    bench.run()
    assert bench.engine.stats.preemptions > 0
    bench.assert_nothing_is_held()
    roomy = Bench(model)
    expected = [roomy.ask(prompt, max_tokens=220, sampling=Sampling(1.0, 1.0, 0, 5)) for prompt in prompts]
    roomy.run()
    assert roomy.engine.stats.preemptions == 0
    for handle, other in zip(handles, expected, strict=True):
        assert bench.tokens(handle) == roomy.tokens(other)


def test_a_step_without_memory_fails_its_prompts_and_computes_its_decodes_again(
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
    (failed,) = [message for message in bench.sent if isinstance(message, Failed)]
    assert (failed.handle, failed.status, failed.code) == (refused, 503, "overloaded")
    expected = generate(model, b"def f(", 20)
    cut = next((at for at, token in enumerate(expected) if token in model.eos_token_ids), 20)
    assert bench.tokens(stream) == expected[:cut]
    bench.assert_nothing_is_held()


def test_a_step_without_memory_ends_all_choices_of_a_prompt_in_it(model: Model, monkeypatch: pytest.MonkeyPatch):
    """One choice decodes beside another that has lost its memory and is computed again."""
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
    assert [type(message) for message in bench.sent if message.handle == handle].count(Failed) == 1
    bench.assert_nothing_is_held()


def test_requests_behind_one_long_prefix_need_only_their_own_pages(model: Model):
    """A prefix of 160 pages, made hot, in a pool of 256: each of eight requests on it needs only a few pages more."""
    bench = Bench(Parrot(model), max_running=16, max_waiting=16, num_pages=256)
    prefix = [token % 200 for token in range(160 * 64)]
    for number in range(3):
        bench.ask([*prefix, *[200 + number] * 50], max_tokens=2, ignore_eos=True)
        bench.run()
    for number in range(8):
        bench.ask([*prefix, *[210 + number] * 50], max_tokens=400, ignore_eos=True)
    for _ in range(12):
        bench.step()
    stats = bench.engine.stats
    assert (stats.requests_running, stats.requests_waiting) == (8, 0)
    bench.run()
    bench.assert_nothing_is_held()


def test_a_step_on_a_gpu_waits_for_its_own_work_and_not_for_copies_of_caches(
    model: Model, monkeypatch: pytest.MonkeyPatch
):
    """A stand-in for a GPU: caches are copied on another stream, and a wait for the device would wait for them too."""
    parrot, waited = Parrot(model), list[torch.device]()
    parrot.device = torch.device("cuda")
    stream = SimpleNamespace(synchronize=lambda: waited.append(parrot.device))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream if device is parrot.device else None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: pytest.fail("waited for the device"))
    monkeypatch.setattr(Runner, "_tensor", lambda _, numbers: torch.tensor(numbers))
    bench = Bench(parrot)
    bench.ask(b"def f(", max_tokens=3, ignore_eos=True)
    bench.run()
    assert len(waited) == 3
