"""A tiny random checkpoint: transformers' own model of it, and two replicas behind our loader."""

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from prfaas_worker.models.base import Model

from . import tiny
from .sequences import scrub


class Checkpoint(NamedTuple):
    """A checkpoint, and what was loaded from it."""

    directory: Path
    oracle: Any
    model: Model
    replica: Model


@pytest.fixture(autouse=True, scope="package")
def one_thread() -> Iterator[None]:
    """Small matrices gain nothing from more threads, and tests run beside each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def scrubbed() -> Iterator[None]:
    yield
    scrub()


@pytest.fixture(scope="package")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    with warnings.catch_warnings():
        # Deprecations inside third-party imports say nothing about us.
        warnings.simplefilter("ignore")
        return load(tmp_path_factory.mktemp("qwen3_next"))


def load(directory: Path) -> Checkpoint:
    """Write a checkpoint and load it three times, the oracle only by transformers."""
    from prfaas_worker.models.qwen3_next.model import Qwen3Next

    tiny.save(tiny.build(), directory)
    return Checkpoint(directory, tiny.load_oracle(directory), Qwen3Next.load(directory), Qwen3Next.load(directory))
