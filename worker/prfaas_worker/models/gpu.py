"""Loads Kimi Linear onto an NVIDIA GPU, or reports in one sentence why it cannot run there.

Weights are counted before they are read, and a few steps are tried before the model is handed out. So a small device, a
wrong driver or a kernel that does not compile is met before the first request. Nothing here has run on a GPU.
"""

import logging
from pathlib import Path
from typing import Final

import torch

from prfaas.errors import ConfigError
from prfaas_worker.models.kimi_linear.checkpoint import weight_bytes
from prfaas_worker.models.kimi_linear.config import read_config
from prfaas_worker.models.kimi_linear.delta_rule import TORCH_RULE
from prfaas_worker.models.kimi_linear.model import KimiLinear, products_type
from prfaas_worker.models.solo import Solo
from prfaas_worker.options import Dtype

log = logging.getLogger(__name__)

# Activations and the cache need room, too.
_ROOM_BESIDE_WEIGHTS: Final = 0.1
_TRIAL_TOKENS: Final = 40


def load_on_gpu(directory: Path, dtype: Dtype) -> KimiLinear:
    """Load a checkpoint onto the current GPU and try it. Raises ConfigError without a GPU that can run it."""
    if not torch.cuda.is_available():
        raise ConfigError("torch finds no GPU: give --device cpu, or install a driver and torch's CUDA build")
    config = read_config(directory)
    try:
        _check_memory(weight_bytes(config, products_type(dtype, "cuda")))
        model = KimiLinear.load(directory, dtype, "cuda")
        _try(model)
        torch.cuda.empty_cache()  # the cache gets what the trial took
    except ConfigError:
        raise
    except Exception as error:  # torch, its drivers and compilers of kernels have no root for their errors
        raise ConfigError(f"{directory} cannot run on the GPU: {type(error).__name__}: {error}") from error
    return model


def _try(model: KimiLinear) -> None:
    """Run trial steps. Where fla's kernels fail, such as without a C compiler, plain torch replaces them."""
    try:
        run_trial_steps(model)
    except Exception as error:
        if model.rule is TORCH_RULE:
            raise
        log.warning("the delta rule runs in plain torch, not by fla's kernels: %s: %s", type(error).__name__, error)
    else:
        return
    model.use_rule(TORCH_RULE)
    run_trial_steps(model)


def _check_memory(weights: int) -> None:
    free_bytes, _ = torch.cuda.mem_get_info()
    if weights * (1 + _ROOM_BESIDE_WEIGHTS) > free_bytes:
        raise ConfigError(
            f"the weights take {weights / 1e9:.1f} GB, and {_ROOM_BESIDE_WEIGHTS:.0%} more to compute, and the GPU has "
            f"{free_bytes / 1e9:.1f} GB free: give --device cpu, or a smaller model"
        )


def run_trial_steps(model: KimiLinear) -> None:
    """Run every kind of step over memory of its own. Raises ConfigError if an output is not a number."""
    solo = Solo(model, slots=2, tokens=2 * _TRIAL_TOKENS)
    sequences = [solo.new(), solo.new()]
    tokens = torch.arange(_TRIAL_TOKENS) % model.vocab_size
    for sequence in sequences:
        solo.prefill(tokens, sequence)
    solo.prefill(tokens[:7], sequences[0])
    logits = solo.decode(tokens[:2], sequences)
    if not logits.isfinite().all():
        raise ConfigError("a trial step on the GPU gave logits that are no numbers: give --device cpu")
