"""Proves that compiled decode steps are the eager ones: whatever their slots and lengths, filled up or not, and that
what they do not take goes the other way."""

import json
import shutil

import pytest
import torch

from prfaas.errors import ConfigError
from prfaas_worker.models.kimi_linear.checkpoint import expected_shapes
from prfaas_worker.models.kimi_linear.config import parse_config
from prfaas_worker.models.kimi_linear.model import KimiLinear, StepShape
from prfaas_worker.models.solo import Solo

from .conftest import ORACLE_CONFIG

pytestmark = pytest.mark.system  # torch starts a C++ compiler

LAYERS = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "linear_attn_config": ORACLE_CONFIG["linear_attn_config"] | {"full_attn_layers": [2], "kda_layers": [1]},
}
CONFIG = (
    ORACLE_CONFIG
    | LAYERS
    | {"model_type": "kimi_linear", "rms_norm_eps": 1e-5, "first_k_dense_replace": 1, "moe_renormalize": True}
)
TOKENS = torch.randint(320, (200,), generator=torch.Generator().manual_seed(5))


def random_model() -> KimiLinear:
    """One KDA and one MLA layer, the same at each call."""
    config = parse_config(json.loads(json.dumps(CONFIG)))
    generator = torch.Generator().manual_seed(0)
    tensors = {n: torch.randn(s, generator=generator) * s[-1] ** -0.5 for n, s in expected_shapes(config).items()}
    return KimiLinear(config, tensors, "random")


@pytest.fixture(scope="module")
def both() -> tuple[Solo, Solo]:
    """The model eager, and compiled for three sequences of up to 128 tokens."""
    if not shutil.which("g++"):
        pytest.skip("no C++ compiler")
    eager, compiled = (Solo(random_model(), slots=4, tokens=200) for _ in range(2))
    compiled.model.compile_decodes([StepShape(3, 128)])
    return eager, compiled


def logits_of(solo: Solo, lengths: list[int], order: list[int]) -> torch.Tensor:
    """Logits of three steps of sequences with these lengths, in an order of slots."""
    solo.memory.pages.fill_(0xFF)
    sequences = [solo.new() for _ in lengths]
    for sequence, length in zip(sequences, lengths, strict=True):
        solo.prefill(TOKENS[:length], sequence)
    ordered = [sequences[i] for i in order]
    steps = [solo.decode(TOKENS[[one.length for one in ordered]], ordered) for _ in range(3)]
    for sequence in reversed(sequences):
        solo.drop(sequence)
    return torch.cat(steps)


@pytest.mark.parametrize(
    ("lengths", "order"),
    [([70, 3, 124], [0, 1, 2]), ([62, 64, 5], [2, 0, 1]), ([100], [0]), ([9, 40], [1, 0]), ([130, 20], [0, 1])],
    ids=["full", "any order", "one of three", "two of three", "too long for the shape"],
)
def test_compiled_steps_are_the_eager_ones(both, lengths, order):
    eager, compiled = (logits_of(solo, lengths, order) for solo in both)
    assert eager.std() > 0.1
    assert (eager - compiled).abs().max() < 1e-4


def test_only_decodes_that_fit_are_run_compiled(both, monkeypatch):
    _, compiled = both
    run = []
    forward = compiled.model._compiled.forward
    monkeypatch.setattr(compiled.model._compiled, "forward", lambda *a: run.append(1) or forward(*a))
    logits_of(compiled, [125, 5], [0, 1])
    assert len(run) == 3
    logits_of(compiled, [128], [0])
    logits_of(compiled, [5, 5, 5, 5], [0, 1, 2, 3])
    assert len(run) == 3


def test_more_sequences_than_can_be_compiled_are_refused(both):
    with pytest.raises(ConfigError, match="up to 32 sequences of this model, not 33"):
        both[0].model.compile_decodes([StepShape(33, 64)])
