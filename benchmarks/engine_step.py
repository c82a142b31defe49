"""What the engine's own work costs a step: deciding, and everything around the model, beside the model's own time.

    prfaas bench engine_step

One process, 64 sequences that decode. The step loop is the real one; its model answers at once, so what is left is the
engine. The rival is the built-in model's own decode step of the same 64 sequences.
"""

import queue
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from benchmarks.report import Figure, run

from prfaas.schedule import BUDGETS, schedule
from prfaas.wire.engine import Generate, Sampling
from prfaas_transfer.cache import CacheLayout
from prfaas_worker.cache.cache import HybridCache
from prfaas_worker.cache.memory import CacheMemory
from prfaas_worker.cache.transfer_frames import layer_groups
from prfaas_worker.cache_spec import CacheGeometry
from prfaas_worker.engine.loop import EngineLoop
from prfaas_worker.engine.profiler import Profiler
from prfaas_worker.engine.remote import EngineTransfers, Fetcher, RemoteCaches, received_origins
from prfaas_worker.engine.runner import Runner
from prfaas_worker.engine.sequences import Event
from prfaas_worker.models import load_model
from prfaas_worker.models.base import Batch, Model
from prfaas_worker.options import Options

RUNNING = 64
PROMPT_TOKENS = 200
STEPS = 300
REACH_MS = 0.3


class Instant:
    """A model with the real one's shapes that computes nothing."""

    def __init__(self, model: Model):
        self.layers, self.fingerprint, self.device = model.layers, model.fingerprint, model.device
        self.vocab_size, self.eos_token_ids = model.vocab_size, model.eos_token_ids
        self._hidden = torch.rand(2048, self.vocab_size)

    def bind(self, memory: CacheMemory) -> None: ...

    def forward(self, batch: Batch, _on_layer: object = None) -> torch.Tensor:
        return self._hidden[: batch.outputs]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden


def engine_of(model: Model | Instant) -> EngineLoop:
    """An engine with RUNNING sequences past their prompts."""
    geometry = CacheGeometry(model.layers)
    memory = CacheMemory(geometry, num_pages=RUNNING * 40, num_slots=RUNNING, max_context=2400)
    inbox: queue.SimpleQueue[Event] = queue.SimpleQueue()
    runner, cache = Runner(model, memory), HybridCache(memory)
    layout = CacheLayout(model.fingerprint, layer_groups(model.layers))
    transfers = EngineTransfers(layout, memory, Options(model_source="", model_name=""), lambda _: None, inbox.put)
    engine = EngineLoop(
        inbox=inbox,
        runner=runner,
        cache=cache,
        kv_events=[],
        publish=lambda _batch: None,
        remote=RemoteCaches(
            runner, cache, Fetcher(runner, transfers), inbox.put, partial(received_origins, "hub", True)
        ),
        profiler=Profiler(1, 1, lambda _profile: None),
        send=lambda _messages: None,
        role="mixed",
        max_running=RUNNING,
        max_waiting=RUNNING,
    )
    for handle in range(RUNNING):
        prompt = [3 + (handle + token) % 200 for token in range(PROMPT_TOKENS)]
        sampling = Sampling(0.0, 1.0, 0, handle)
        engine.inbox.put(Generate(handle, "r", prompt, 1, 2000, sampling, -1, "", ignore_eos=True))
    while len(engine.requests.facts(engine.cache).running) < RUNNING or engine.stats.generation_tokens < 2 * RUNNING:
        engine.step(wait=False)
    return engine


def median_ms(call: Callable[[], object]) -> float:
    """Median time of a call."""
    seconds = []
    for _ in range(STEPS):
        started = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - started)
    return 1000 * statistics.median(seconds)


def figures() -> list[Figure]:
    """Measure everything."""
    model, _ = load_model("builtin:kimi-linear-tiny", 1)
    engine = engine_of(Instant(model))
    deciding = median_ms(lambda: schedule(engine.requests.facts(engine.cache), BUDGETS["mixed"]))
    around = median_ms(lambda: engine.step(wait=False))
    whole = engine_of(model)
    real = median_ms(lambda: whole.step(wait=False)) - around
    beside = {"unit": "ms", "rival": "the built-in model's own step", "rival_value": real}
    return [
        Figure(name=f"schedule, {RUNNING} running", value=deciding, reach=REACH_MS, **beside),
        Figure(name=f"whole step without the model, {RUNNING} running", value=around, **beside),
    ]


if __name__ == "__main__":
    run("engine_step", __doc__, figures)
