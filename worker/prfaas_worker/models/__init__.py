"""Models that the engine can run: Kimi Linear by itself, Qwen3-Next through transformers."""

import logging
from pathlib import Path
from typing import Final

import torch

from prfaas.errors import ConfigError
from prfaas_worker.assets import model_directory, read_object
from prfaas_worker.models.base import Model
from prfaas_worker.models.qwen3_next.config import check_config
from prfaas_worker.options import Device, Dtype

log = logging.getLogger(__name__)


def load_model(
    source: str, threads: int | None, device: Device = "cpu", dtype: Dtype = "float32"
) -> tuple[Model, Path]:
    """Load a model (a directory or `builtin:NAME`); return it and the directory of its tokenizer.

    `threads` are torch's, for the whole process; None keeps torch's default. Device "auto" is a GPU that can run the
    checkpoint, else the CPU, with the reason in the log. Dtype "auto" is float32 on a CPU and bfloat16 on a GPU.
    Raises ConfigError if the checkpoint is not supported, or cannot run with this type or device.
    """
    if threads is not None:
        torch.set_num_threads(threads)
    directory = model_directory(source)
    path = directory / "config.json"
    model_type = read_object(path).get("model_type")
    # A model's code is loaded when it is served; transformers takes seconds, so refusals are before it.
    load = _LOADS.get(str(model_type))
    if load is None:
        raise ConfigError(
            f"{path}: model_type is {model_type!r}; a worker serves {' and '.join(_LOADS)}: serve this checkpoint with "
            "vLLM"
        )
    return load(directory, device, dtype), directory


def _load_kimi_linear(directory: Path, device: Device, dtype: Dtype) -> Model:
    from prfaas_worker.models.gpu import load_on_gpu
    from prfaas_worker.models.kimi_linear.model import KimiLinear

    if device == "cuda":
        return load_on_gpu(directory, dtype)
    if device == "auto" and torch.cuda.is_available():
        try:
            return load_on_gpu(directory, dtype)
        except ConfigError as error:
            log.warning("the model runs on the CPU, not on the GPU: %s", error)
    return KimiLinear.load(directory, dtype)


def _load_qwen3_next(directory: Path, device: Device, dtype: Dtype) -> Model:
    check_config(directory)
    if device == "cuda":
        raise ConfigError(f"{directory}: Qwen3-Next runs only on the CPU; leave --device cuda out")
    if dtype == "bfloat16":
        raise ConfigError(f"{directory}: Qwen3-Next computes only in float32; leave --dtype bfloat16 out")
    if device == "auto" and torch.cuda.is_available():
        log.warning("the model runs on the CPU, not on the GPU: only Kimi Linear runs on a GPU")
    from prfaas_worker.models.qwen3_next.model import Qwen3Next

    return Qwen3Next.load(directory)


_LOADS: Final = {"kimi_linear": _load_kimi_linear, "qwen3_next": _load_qwen3_next}
"""By the model_type of config.json."""
