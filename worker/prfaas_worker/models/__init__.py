"""Models that the engine can run: `load_model` picks the implementation by the checkpoint's `model_type`."""

import json
from pathlib import Path

import torch

from prfaas.errors import ConfigError
from prfaas_worker.assets import model_directory
from prfaas_worker.models.base import Model
from prfaas_worker.models.kimi_linear.model import KimiLinear


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
    directory = model_directory(source)
    model_type = json.loads((directory / "config.json").read_text(encoding="utf-8")).get("model_type")
    if model_type != KimiLinear.model_type:
        raise ConfigError(
            f"{directory / 'config.json'}: model_type is {model_type!r}; the engine runs {KimiLinear.model_type!r}"
        )
    return KimiLinear.load(directory), directory
