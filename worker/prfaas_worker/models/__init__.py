"""Models that the engine can run: Kimi Linear by itself, other hybrid families through transformers."""

from pathlib import Path

import torch

from prfaas.errors import ConfigError
from prfaas_worker.assets import model_directory
from prfaas_worker.models.base import Model
from prfaas_worker.models.generic.families import read_family, read_model_type
from prfaas_worker.options import Device, Dtype


def load_model(
    source: str, threads: int | None, device: Device = "cpu", dtype: Dtype = "float32"
) -> tuple[Model, Path]:
    """Load a model and say where its tokenizer's files are.

    Args:
        source: a directory, or `builtin:NAME`.
        threads: torch's intra-op threads, process-wide; None leaves torch's choice.
        device: where it runs; "auto" is a GPU where there is one and the family has kernels for it.
        dtype: what matrix products are computed in on a CPU; "auto" measures.

    Raises:
        ConfigError: the directory, its configuration or its weights are not those of a model that we run, or it does
            not run in this type.

    """
    if threads is not None:
        torch.set_num_threads(threads)
    directory = model_directory(source)
    # A family's code is loaded when it is served; that of transformers takes seconds, so refusals come before it.
    on_gpu = device == "cuda" or (device == "auto" and torch.cuda.is_available())
    if read_model_type(directory) == "kimi_linear" and on_gpu:
        if dtype == "float32":
            raise ConfigError("on a GPU this family computes in bfloat16: leave --dtype out, or give --device cpu")
        from prfaas_worker.models.kimi_linear import cuda

        return cuda.load(directory), directory
    if read_model_type(directory) == "kimi_linear":
        from prfaas_worker.models.kimi_linear.model import KimiLinear

        return KimiLinear.load(directory, dtype), directory
    read_family(directory)
    if device == "cuda":
        raise ConfigError(f"{directory}: this family runs on the CPU alone here; leave --device cuda out")
    if dtype == "bfloat16":
        raise ConfigError(f"{directory}: this family computes in float32 alone here; leave --dtype bfloat16 out")
    from prfaas_worker.models.generic.model import GenericModel

    return GenericModel.load(directory), directory
