"""Our worker's model on a device: its log probabilities beside the CPU's, its speed, its cache on a CPU.

Models are Kimi Linear: the built-in one, and 69 M random parameters. Qwen3-Next runs on CPUs alone. What comes out is
compared after every kind of step: prompts in two chunks, and decodes of all of them together. Tokens are given, so a
difference at one step changes no other's input.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Final, NamedTuple

import torch
from benchmarks.device.cases import Case
from benchmarks.device.memory import synchronize
from benchmarks.kernels.model import random_model
from benchmarks.report import Figure

from prfaas.schedule import BUDGETS
from prfaas_worker.cache.cache import HybridCache
from prfaas_worker.cache.memory import CacheMemory
from prfaas_worker.cache.staging import Staging
from prfaas_worker.cache.transfer_frames import TokenSpan
from prfaas_worker.cache_spec import CacheGeometry
from prfaas_worker.engine.runner import Runner, prefill_seconds
from prfaas_worker.models import load_model
from prfaas_worker.models.kimi_linear.model import KimiLinear
from prfaas_worker.models.solo import Solo, SoloSequence
from prfaas_worker.options import Dtype

EXACT_REACH: Final = 1e-3
"""fp32 differs by the order in which products add."""
ROUNDED_REACH: Final = 3.0
"""bf16 may differ from fp32 by this many times the CPU's own bf16, on average: experts at a near-tie change places."""
CPU, CPU_NAME = "cpu", "this machine's CPUs, fp32"


class Size(NamedTuple):
    """What is run: models, the last of them for speed; prompts and decodes for parity; then prefills, and batches of
    decodes, each with a cached prompt."""

    models: tuple[str, ...]
    prompts: tuple[int, ...]
    decodes: int
    prefills: tuple[int, ...]
    batches: tuple[int, ...]
    cached_tokens: int
    steps: int


TINY, MIDDLE = "1.2 M parameters", "69 M parameters"
SIZES = {
    "cpu": Size((TINY,), (40, 7), 2, (128,), (1, 2), 32, 2),
    "cuda": Size((TINY, MIDDLE), (300, 150, 33, 1), 16, (512, 4096, 32_768), (1, 16, 64), 256, 40),
}
# The CPU needs too long for more.
MOST_CPU_TOKENS, MOST_CPU_BATCH = 4096, 16


def load_tiny(device: str, dtype: Dtype) -> KimiLinear:
    model, _ = load_model("builtin:kimi-linear-tiny", None, device, dtype)
    assert isinstance(model, KimiLinear)
    return model


def load_random(device: str, dtype: Dtype) -> KimiLinear:
    config, tensors = _random_tensors()
    return KimiLinear(config, tensors, "random", getattr(torch, dtype), device)


_random_tensors = cache(random_model)
MODELS: dict[str, Callable[[str, Dtype], KimiLinear]] = {TINY: load_tiny, MIDDLE: load_random}


@torch.inference_mode()
def log_probabilities(model: KimiLinear, size: Size) -> torch.Tensor:
    """Return log probabilities [outputs, vocabulary] on the CPU, after prompts and after decodes."""
    tokens = torch.randint(256, (max(size.prompts) + size.decodes,), generator=torch.Generator().manual_seed(1))
    solo = Solo(model, slots=len(size.prompts), tokens=len(tokens))
    sequences, hidden = [solo.new() for _ in size.prompts], []
    for sequence, length in zip(sequences, size.prompts, strict=True):
        first = length // 3
        for chunk in (tokens[:first], tokens[first:length]):
            if len(chunk):
                hidden.append(solo.prefill(chunk, sequence))
    found = [model.logits(torch.stack(hidden))]
    for step in range(size.decodes):
        found.append(solo.decode(tokens[step : step + len(sequences)], sequences))
    return torch.cat(found).float().log_softmax(-1).cpu()


@cache
def reference(name: str, dtype: Dtype, size: Size) -> torch.Tensor:
    return log_probabilities(MODELS[name](CPU, dtype), size)


def parity(name: str, dtype: Dtype, device: str) -> Iterator[Figure]:
    """Compare a model's log probabilities with those in fp32 on the CPU; bf16 beside the CPU's own bf16."""
    size, model = SIZES[device], MODELS[name](device, dtype)
    off = (log_probabilities(model, size) - reference(name, "float32", size)).abs()
    what = f"{name}, {model.arithmetic}, against the CPU's fp32: log probabilities differ"
    if dtype == "float32":
        yield Figure(name=f"{what}, at most", value=off.max().item(), unit="nats", reach=EXACT_REACH)
        return
    cpu = (reference(name, dtype, size) - reference(name, "float32", size)).abs()
    rival = "the CPU's bf16"
    yield Figure(
        name=f"{what}, at most", value=off.max().item(), unit="nats", rival=rival, rival_value=cpu.max().item()
    )
    mean, rival_mean = off.mean().item(), cpu.mean().item()
    reach = ROUNDED_REACH * rival_mean
    yield Figure(name=f"{what}, on average", value=mean, unit="nats", reach=reach, rival=rival, rival_value=rival_mean)


@torch.inference_mode()
def continued(device: str) -> Iterator[Figure]:
    """Have a CPU go on with a cache that the device has computed, and compare with its own."""
    size = SIZES[device]
    there, here = (Solo(load_tiny(where, "float32"), slots=2, tokens=512) for where in (device, CPU))
    tokens = torch.randint(256, (max(size.prompts),), generator=torch.Generator().manual_seed(2))
    computed, own, taken = there.new(), here.new(), here.new()
    there.prefill(tokens, computed)
    here.prefill(tokens, own)
    _carry(there, computed, here, taken)
    same = here.decode(tokens[:1].expand(2), [own, taken]).log_softmax(-1)
    yield Figure(
        name="a CPU goes on with a cache of the device: log probabilities differ, at most",
        value=(same[0] - same[1]).abs().max().item(),
        unit="nats",
        reach=EXACT_REACH,
    )


def _carry(there: Solo, computed: SoloSequence, here: Solo, taken: SoloSequence) -> None:
    """Copy all of a sequence's cache to one that is new, through host memory, as transfers do."""
    giving, landing = Staging(there.memory), Staging(here.memory)
    taken.length = computed.length
    span, mark = TokenSpan(0, computed.length), giving.mark()
    source, target = there.pages(computed).tolist(), here.pages(taken).tolist()

    def received(sent: dict[str, memoryview]) -> dict[str, memoryview]:
        rooms = {name: landing.room(len(data)) for name, data in sent.items()}
        for name, data in sent.items():
            rooms[name][:] = data
        return rooms

    for layer, spec in enumerate(there.model.layers):
        if spec.rows:
            landing.land_rows(layer, target, span, received(giving.read_rows(layer, source, span, mark)))
        if spec.state:
            landing.land_state(layer, taken.slot, received(giving.read_state(layer, computed.slot, mark)))


def _fast_model(size: Size, device: str) -> KimiLinear:
    """Return the model that is timed, in the type that a worker multiplies in there."""
    return MODELS[size.models[-1]](device, _type_on(device))


def _type_on(device: str) -> Dtype:
    return "float32" if device == CPU else "bfloat16"


@cache
def prefills(size: Size, device: str) -> Callable[[int], float]:
    """Return what gives the seconds of a prompt's prefill, in the steps of an engine."""
    model, most = _fast_model(size, device), max(size.prefills)
    geometry = CacheGeometry(model.layers)
    pages = geometry.pages_for(most)
    memory = CacheMemory(
        geometry, num_pages=pages, num_slots=1, max_context=pages * geometry.page_tokens, device=device
    )
    return partial(prefill_seconds, Runner(model, memory), HybridCache(memory), BUDGETS["prefill"].step_tokens)


def prefill(tokens: int, device: str) -> Iterator[Figure]:
    """Measure tokens a second of a prompt."""
    size = SIZES[device]
    measured = prefills(size, device)
    measured(tokens)  # kernels are compiled and tuned
    seconds = statistics.median(measured(tokens) for _ in range(3))
    rival = tokens / prefills(size, CPU)(tokens) if tokens <= MOST_CPU_TOKENS else None
    name = f"{size.models[-1]}, {_type_on(device)}: prefill of {tokens:,} tokens"
    yield Figure(name=name, value=tokens / seconds, unit="tokens/s", better="higher", rival=CPU_NAME, rival_value=rival)


@torch.inference_mode()
def step_seconds(batch: int, device: str, size: Size) -> float:
    """Return a decode step's median time, until its tokens are known to the host."""
    solo = Solo(_fast_model(size, device), slots=batch, tokens=size.cached_tokens + 2 * size.steps)
    sequences = [solo.new() for _ in range(batch)]
    for sequence in sequences:
        solo.prefill(torch.randint(256, (size.cached_tokens,)), sequence)
    tokens, taken = torch.randint(256, (batch,)), list[float]()
    synchronize(solo.model.device)
    for _ in range(size.steps):
        began = time.perf_counter()
        tokens = solo.decode(tokens, sequences).argmax(-1).cpu()
        taken.append(time.perf_counter() - began)
    return statistics.median(taken[size.steps // 4 :])


def decode(batch: int, device: str) -> Iterator[Figure]:
    size = SIZES[device]
    rival = 1e3 * step_seconds(batch, CPU, size) if batch <= MOST_CPU_BATCH else None
    yield Figure(
        name=f"{size.models[-1]}, {_type_on(device)}: decode step of {batch} behind {size.cached_tokens} tokens each",
        value=1e3 * step_seconds(batch, device, size),
        unit="ms",
        rival=CPU_NAME,
        rival_value=rival,
    )


def cases(device: str) -> list[Case]:
    """Return parity in both types, a cache that crosses, and speeds."""
    size = SIZES[device]
    found = [
        Case(f"parity of {name} in {dtype}", partial(parity, name, dtype, device), is_check=True)
        for dtype in ("float32", "bfloat16")
        for name in size.models
    ]
    found.append(Case("a cache of the device on a CPU", partial(continued, device), is_check=True))
    found += [
        Case(f"prefill of {tokens} tokens", partial(prefill, tokens, device), is_must=tokens <= MOST_CPU_TOKENS)
        for tokens in size.prefills
    ]
    found += [
        Case(f"decode of {batch}", partial(decode, batch, device), is_must=batch <= MOST_CPU_BATCH)
        for batch in size.batches
    ]
    return found
