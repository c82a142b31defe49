"""Models that the engine can run; today Kimi Linear, and a checkpoint of another family says so by its name."""

from pathlib import Path

import torch

from prfaas_worker.assets import model_directory
from prfaas_worker.models.base import Model


def load_model(source: str, threads: int | None) -> tuple[Model, Path]:
    """Load a model and say where its tokenizer's files are.

    Args:
        source: a directory, or `builtin:NAME`.
        threads: torch's intra-op threads, process-wide; None leaves torch's choice.

    Raises:
        ConfigError: the directory, its configuration or its weights are not those of a model that we run.

    """
    if threads is not None:
        torch.set_num_threads(threads)
    from prfaas_worker.models.kimi_linear.model import KimiLinear  # a family's code is loaded when it is served

    directory = model_directory(source)
    return KimiLinear.load(directory), directory
