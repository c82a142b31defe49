"""Kimi Linear on one NVIDIA GPU: the engine's `Model` in bf16, over the same paged cache, with kernels of our own.

`model` puts it together; `blocks` the layers; `weights` and `sources` their tensors; `step` where a batch's tokens
stand.
KDA: `conv`, `chunked` (prompts, through fla), `delta` (decoding). MLA: `rows`, `causal` (prompts), `paged` (decoding).
Experts: `routing`, `grouped`. `graphs` captures decoding steps.

Nothing is imported here, so this package can be asked for where Triton is not installed.
"""

from pathlib import Path
from typing import TYPE_CHECKING

from prfaas.errors import ConfigError

if TYPE_CHECKING:
    from prfaas_worker.models.kimi_linear.cuda.model import KimiLinearCuda


def load(directory: Path, device: str = "cuda") -> "KimiLinearCuda":
    """Load a checkpoint onto a GPU.

    Raises:
        ConfigError: there is no such GPU, its kernels are not installed, or the checkpoint is not one that we run.

    """
    import torch

    if not torch.cuda.is_available():
        raise ConfigError(f"the device {device!r} was asked for, and torch finds no GPU: run with the device 'cpu'")
    try:
        import triton  # noqa: F401, asked for here so that its absence is explained
    except ImportError as error:
        raise ConfigError(
            f"Kimi Linear on a GPU needs Triton, which comes with torch's CUDA builds: install one: {error}"
        ) from error
    from prfaas_worker.models.kimi_linear.cuda.model import KimiLinearCuda

    return KimiLinearCuda.load(directory, torch.device(device))
