"""Every family as a tiny random checkpoint: transformers' own model of it, and two replicas behind our loader."""

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
    """One family's checkpoint, and what was loaded from it."""

    model_type: str
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


@pytest.fixture(scope="package", params=list(tiny.CONFIGS))
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    with warnings.catch_warnings():
        # Deprecations inside third-party imports say nothing about us.
        warnings.simplefilter("ignore")
        return load(request.param, tmp_path_factory.mktemp(request.param))


def load(model_type: str, directory: Path) -> Checkpoint:
    """Write a checkpoint and load it three times, the oracle by transformers alone."""
    from prfaas_worker.models.generic.model import GenericModel

    tiny.save(tiny.build(model_type), directory)
    return Checkpoint(
        model_type, directory, tiny.load_oracle(directory), GenericModel.load(directory), GenericModel.load(directory)
    )
