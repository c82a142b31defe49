"""Before anything is timed: a small model on the GPU gives the logits of the CPU's implementation, or nothing is
measured."""

from dataclasses import replace

import torch
from benchmarks.accelerator.sizes import KIMI_LINEAR_48B

from prfaas.errors import InternalError
from prfaas_worker.models.base import Model
from prfaas_worker.models.kimi_linear.cuda.model import KimiLinearCuda
from prfaas_worker.models.kimi_linear.cuda.sources import MemorySource, RandomSource
from prfaas_worker.models.kimi_linear.model import KimiLinear
from prfaas_worker.models.kimi_linear.shapes import expected_shapes
from prfaas_worker.models.solo import Solo

# The checkpoint's heads and latents in a model that a CPU runs in seconds.
CONFIG = replace(
    KIMI_LINEAR_48B,
    vocab_size=512,
    hidden_size=256,
    intermediate_size=512,
    max_context=4096,
    layer_kinds=("linear", "attention", "linear", "attention"),
    dense_layers=(True, False, False, False),
    num_heads=4,
    kda_heads=2,
    num_experts=16,
    experts_per_token=4,
    expert_size=128,
)
# fp32 goes through kernels that multiply as tf32. In bf16 scores that nearly tie pick other experts, which moves the
# logits by a fifth though nothing is wrong: there every token goes to all experts, and fp32 proves the picking.
CASES = (
    (torch.float32, CONFIG, 1e-2),
    (torch.bfloat16, replace(CONFIG, experts_per_token=CONFIG.num_experts), 5e-2),
)
DAMAGE = 5
PROMPT, CHUNKS, STEPS = 700, (300, 1, 399), 4


def check_against_cpu(device: str = "cuda") -> str:
    """Compare logits after a prompt in chunks and after some decoded tokens, in fp32 and bf16, and with a damaged
    cache.

    Returns:
        What was found, in a line.

    Raises:
        InternalError: the logits differ by more than rounding, or the damage did not show.

    """
    source, tensors = RandomSource(torch.device("cpu")), {}
    for name, shape in expected_shapes(CONFIG).items():
        tensors[name] = torch.empty(shape)
        source.read(name, tensors[name])
    found = []
    for dtype, config, bound in CASES:
        right, _ = _logits(KimiLinear(config, tensors, "check"))
        model = KimiLinearCuda.build(config, MemorySource(tensors), torch.device(device), dtype, "check")
        logits, damaged = _logits(model)
        error, damage = _relative(logits, right), _relative(damaged, right[-1])
        # NaN is above every bound.
        if not error < bound or not damage > DAMAGE * error:
            raise InternalError(
                f"the GPU's model in {dtype} differs from the CPU's by {error:.2e} of the logits' norm, {bound:.0e} is "
                f"allowed; with a transposed state by {damage:.2e}, which should be far more: no figure would be worth "
                "anything"
            )
        found.append(f"{str(dtype).removeprefix('torch.')} {error:.1e} (transposed state: {damage:.1e})")
    return "logits against the CPU's: " + ", ".join(found)


def _logits(model: Model) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits after the prompt and each decoded token; and the last ones again, from a state transposed before."""
    solo = Solo(model, slots=2, tokens=1024)
    solo.memory.pages.zero_()
    tokens = torch.randint(CONFIG.vocab_size, (PROMPT + STEPS,), generator=torch.Generator().manual_seed(1))
    sequence = solo.new()
    for part in tokens[:PROMPT].split(list(CHUNKS)):
        hidden = solo.prefill(part, sequence)
    rows = [model.logits(hidden).unsqueeze(0)]
    for token in tokens[PROMPT:].split(1):
        before = solo.memory.slots.clone()
        rows.append(solo.decode(token, [sequence]))
    solo.memory.slots.copy_(before)
    for layer in range(len(model.layers)):
        if "recurrent" in (states := solo.memory.states(layer)):
            states["recurrent"][sequence.slot] = states["recurrent"][sequence.slot].mT.clone()
    sequence.length -= 1
    return torch.cat(rows).cpu(), solo.decode(tokens[-1:], [sequence])[0].cpu()


def _relative(found: torch.Tensor, right: torch.Tensor) -> float:
    return ((found.double() - right.double()).norm() / right.double().norm()).item()
