"""Chooses the type in which matrices are multiplied: bf16 if instructions, speed and the weights at hand all allow it.

Products of tokens and weights may be bf16, summed in fp32: projections, MLPs and experts. What is sensitive stays fp32
everywhere: the residual stream, norms, gates, decays, the router, S, attention, the logits. So do the cache's rows and
states, and with them their layout.

A processor without AVX512-BF16 or AMX emulates bf16, many times slower. A processor that has them may still lose on
small matrices to what converting costs. So the model's own shapes are timed. A GPU always has them, and is not timed.

Rounding may turn a token to other experts, from where everything differs. So a prompt goes through both forms of the
weights. The distribution of the next token must stay as it was, to MOST_DIVERGENCE nats on average, half a percent of
the perplexity. The shipped model moves by 0.001 on random tokens and 0.00005 on text. One of random weights, whose
router decides by a hair, moves by 0.013.

The fingerprint names neither form. Both read each other's caches, with the error that was just bounded. If it told them
apart, no cluster could prefill for another one with older processors, which is what this system is for. Where answers
must be the same to fp32's last digits on whichever instance, every pool is given float32.
"""

import math
import re
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

import torch
from torch import Tensor

from prfaas_worker.models.kimi_linear.checkpoint import Shape, expected_shapes
from prfaas_worker.models.kimi_linear.config import KimiLinearConfig
from prfaas_worker.models.kimi_linear.layers import linear
from prfaas_worker.options import Dtype

LEAST_SPEEDUP: Final = 1.2
MOST_DIVERGENCE: Final = 0.005
PROBE_TOKENS: Final = 128
_PROMPT_TOKENS, _REPEATS = 256, 3
_PRODUCTS = re.compile(r"\b([qkvo]_proj|kv_a_proj_with_mqa|(gate|up|down)_proj|w[123])\.weight$")
_EXPERT = re.compile(r"\.experts\.(\d+)\.")


class Speedups(NamedTuple):
    """The speed of bf16 in multiples of fp32's, for a prompt's chunk and for one token."""

    prompt: float
    token: float


class PrecisionFacts(NamedTuple):
    """The inputs of `choose`. None means not measured, and is no objection."""

    asked: Dtype
    instructions: frozenset[str]
    speedups: Speedups | None = None
    divergence: float | None = None


class Precision(NamedTuple):
    dtype: torch.dtype
    reason: str


def choose(facts: PrecisionFacts) -> Precision:
    """Decide from the known facts: a caller measures on while the answer is bfloat16."""
    if facts.asked != "auto":
        return Precision(getattr(torch, facts.asked), "asked for")
    if not facts.instructions:
        return Precision(torch.float32, "this processor has neither AVX512-BF16 nor AMX")
    found = [" and ".join(sorted(facts.instructions))]
    if facts.speedups is not None:
        prompt, token = facts.speedups
        found.append(f"bfloat16 is {prompt:.2f} times as quick on prompts, {token:.2f} on single tokens")
        if min(facts.speedups) < LEAST_SPEEDUP:
            return Precision(torch.float32, f"{found[-1]}; {LEAST_SPEEDUP} are asked for")
    if facts.divergence is not None:
        found.append(f"it moves the next token's distribution by {facts.divergence:.2g} nats")
        if not facts.divergence <= MOST_DIVERGENCE:  # nor if it is no number
            return Precision(torch.float32, f"bfloat16: {found[-1]}; at most {MOST_DIVERGENCE} are allowed")
    return Precision(torch.bfloat16, ", ".join(found))


def instructions(cpuinfo: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """The processor's instructions for bf16 products; none if the system does not report them."""
    try:
        return frozenset(re.findall(r"\b(?:avx512_bf16|amx_bf16)\b", cpuinfo.read_text()))
    except OSError:
        return frozenset()


@torch.inference_mode()
def speedups(config: KimiLinearConfig) -> Speedups:
    seconds = {torch.float32: [0.0, 0.0], torch.bfloat16: [0.0, 0.0]}
    for (outputs, inputs), times in products_of_a_token(config).items():
        weight = torch.randn(outputs, inputs)
        for dtype, sums in seconds.items():
            typed = weight.to(dtype)
            for i, tokens in enumerate((_PROMPT_TOKENS, 1)):
                sums[i] += times * _quickest(partial(linear, torch.randn(tokens, inputs), typed))
    slow, quick = seconds.values()
    return Speedups(slow[0] / quick[0], slow[1] / quick[1])


def products_of_a_token(config: KimiLinearConfig) -> Counter[Shape]:
    """Shape of the weights -> products of each token; experts count as often as they are selected."""
    counted: Counter[Shape] = Counter()
    for name, shape in expected_shapes(config).items():
        expert = _EXPERT.search(name)
        if _PRODUCTS.search(name) and (expert is None or int(expert.group(1)) < config.experts_per_token):
            counted[shape] += 1
    return counted


def weight_bytes(config: KimiLinearConfig, products: torch.dtype) -> int:
    """Bytes of the weights with products of this type and all else in fp32."""
    return sum(
        math.prod(shape) * (products if _PRODUCTS.search(name) else torch.float32).itemsize
        for name, shape in expected_shapes(config).items()
    )


def _quickest(work: Callable[[], object]) -> float:
    taken = []
    for _ in range(1 + _REPEATS):
        started = time.perf_counter()
        work()
        taken.append(time.perf_counter() - started)
    return min(taken[1:])  # the first one makes ready


def probe_tokens(vocab_size: int) -> Tensor:
    """Random tokens [PROBE_TOKENS], unlike any text: a hard case for `divergence`."""
    return torch.randint(vocab_size, (PROBE_TOKENS,), generator=torch.Generator().manual_seed(0))


def divergence(expected: Tensor, found: Tensor) -> float:
    """Mean divergence, in nats, of one set of next-token log probabilities [T, vocab_size] from another."""
    return (expected.exp() * (expected - found)).sum(-1).mean().item()
