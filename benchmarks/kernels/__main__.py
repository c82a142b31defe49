"""What Kimi Linear's kernels reach on this processor, in fp32, each beside its rival in the same run.

    prfaas bench kernels

The chunked delta rule against the torch form in transformers; a prompt of 4K tokens through 69 M parameters against the
peak of a square matrix product; and decode of the built-in model against the matrix products that its own steps make.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from benchmarks.kernels.model import prefill_flops, random_model
from benchmarks.kernels.replay import products_of
from benchmarks.kernels.rival import inputs, transformers_rule
from benchmarks.kernels.timing import GEMM_FLOPS, gemm, gflops, in_turns
from benchmarks.report import Figure, run

from prfaas.schedule import BUDGETS
from prfaas_worker.cache.cache import HybridCache
from prfaas_worker.cache.memory import CacheMemory
from prfaas_worker.cache_spec import CacheGeometry
from prfaas_worker.engine.runner import Runner, prefill_seconds
from prfaas_worker.models import load_model
from prfaas_worker.models.kimi_linear.delta_rule import kda_chunked
from prfaas_worker.models.kimi_linear.model import KimiLinear
from prfaas_worker.models.solo import Solo

TOKENS = 4096
# Log decays are minus this times softplus of normal numbers; with the second every chunk is as small as they get.
GATE_SCALES = {"weak gates": 0.3, "strong gates": 10.0}
RULE_REACH_TIMES = 20.0
# 60 K tokens a second where a matrix product reaches 170 GFLOP/s.
RULE_REACH_TOKENS = 60e3 / 170
PREFILL_REACH_PERCENT = 65.0
DECODE_REACH = {1: 7.0, 16: 6.0}
# Tokens in the cache before, and room for those that are measured.
DECODE_TOKENS, DECODE_ROOM = 1024, 256


def rule_figures() -> Iterator[Figure]:
    """Tokens a second of the delta rule in one layer of 8 heads of 64."""
    for gates, scale in GATE_SCALES.items():
        ours, theirs = inputs(TOKENS, scale)
        contenders = {
            "ours": lambda o=ours: kda_chunked(*o),
            "gemm": gemm(),
            "theirs": lambda t=theirs: transformers_rule(*t),
        }
        seconds = in_turns(contenders, 3)
        peak = gflops(GEMM_FLOPS, seconds["gemm"])
        yield Figure(
            name=f"delta rule, 8 x 64, {TOKENS} tokens, {gates}",
            value=TOKENS / seconds["ours"],
            unit="tokens/s",
            better="higher",
            reach=RULE_REACH_TOKENS * peak,
            rival="chunk_kimi_delta_attention of transformers",
            rival_value=TOKENS / seconds["theirs"],
        )


def prefill_figures() -> Iterator[Figure]:
    """Share of the matrix product's peak that a prompt reaches, in the steps of an engine."""
    config, tensors = random_model()
    model = KimiLinear(config, tensors, "random")
    geometry = CacheGeometry(model.layers)
    memory = CacheMemory(geometry, num_pages=geometry.pages_for(TOKENS), num_slots=1, max_context=TOKENS)
    step_tokens = BUDGETS["prefill"].step_tokens
    prefill = partial(prefill_seconds, Runner(model, memory), HybridCache(memory), step_tokens, TOKENS)
    seconds = in_turns({"prefill": prefill, "gemm": gemm()}, 7)
    peak = gflops(GEMM_FLOPS, seconds["gemm"])
    yield Figure(
        name=f"prefill, 69 M parameters, {TOKENS} tokens in steps of {step_tokens}",
        value=gflops(prefill_flops(config, TOKENS), seconds["prefill"]),
        unit="GFLOP/s",
        better="higher",
        reach=PREFILL_REACH_PERCENT / 100 * peak,
        rival="fp32 matrix product, 2048 x 2048",
        rival_value=peak,
    )


def decode_figures() -> Iterator[Figure]:
    """Time of a decode step of the built-in model beside that of the products it makes."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # nothing in this model is large enough for two
    for batch, reach in DECODE_REACH.items():
        step = _decode_step(batch)
        seconds = in_turns({"step": step, "products": products_of(step)}, 200)
        yield Figure(
            name=f"decode, 1.2 M parameters, batch {batch}",
            value=seconds["step"] * 1e3,
            unit="ms",
            reach=reach * seconds["products"] * 1e3,
            rival="its own matrix products",
            rival_value=seconds["products"] * 1e3,
        )
    torch.set_num_threads(threads)


def _decode_step(batch: int) -> Callable[[], object]:
    """Return one step of sequences that hold a prompt already."""
    model, _ = load_model("builtin:kimi-linear-tiny", None)
    solo = Solo(model, slots=batch, tokens=DECODE_TOKENS + DECODE_ROOM)
    sequences = [solo.new() for _ in range(batch)]
    for sequence in sequences:
        solo.prefill(torch.randint(256, (DECODE_TOKENS,)), sequence)
    return partial(solo.decode, torch.randint(256, (batch,)), sequences)


def figures() -> Iterator[Figure]:
    yield from decode_figures()
    with torch.inference_mode():
        yield from rule_figures()
    yield from prefill_figures()


if __name__ == "__main__":
    run("kernels", __doc__, figures)
