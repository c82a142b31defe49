"""Models that the engine can run: Kimi Linear by itself, other hybrid families through transformers."""

import logging
from pathlib import Path

import torch

from prfaas.errors import ConfigError
from prfaas_worker.assets import model_directory
from prfaas_worker.models.base import Model
from prfaas_worker.models.generic.families import read_family, read_model_type
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
    # A family's code is loaded when it is served; that of transformers takes seconds, so refusals are before it.
    load = _load_kimi_linear if read_model_type(directory) == "kimi_linear" else _load_generic
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


def _load_generic(directory: Path, device: Device, dtype: Dtype) -> Model:
    read_family(directory)
    if device == "cuda":
        raise ConfigError(f"{directory}: this family runs only on the CPU; leave --device cuda out")
    if dtype == "bfloat16":
        raise ConfigError(f"{directory}: this family computes only in float32; leave --dtype bfloat16 out")
    if device == "auto" and torch.cuda.is_available():
        log.warning("the model runs on the CPU, not on the GPU: only Kimi Linear runs on a GPU")
    from prfaas_worker.models.generic.model import GenericModel

    return GenericModel.load(directory)
