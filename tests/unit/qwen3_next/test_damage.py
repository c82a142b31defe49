"""Proves that the bit and bound claims of this folder can fail: a damaged cache moves the logits far past any bound.

Most greedy tokens would survive the same damage, so it is measured on the logits.
"""

from collections.abc import Callable

import pytest
import torch

from prfaas_worker.models.solo import Solo, SoloSequence

from .conftest import Checkpoint
from .sequences import distance, prefilled, rows_of, solo_of, write_rows
from .tiny import VOCAB

# Rounding between differently cut chunks stays below a thousandth of this.
DAMAGE = 0.1
LENGTH = 100

Damage = Callable[[Solo, SoloSequence], None]


@pytest.fixture(scope="module")
def tokens() -> torch.Tensor:
    return torch.randint(VOCAB, (LENGTH + 4,), generator=torch.Generator().manual_seed(3))


def harm(checkpoint: Checkpoint, tokens: torch.Tensor, damage: Damage) -> float:
    """How far damage after LENGTH tokens moves the logits of the next four."""
    solo = solo_of(checkpoint.model)
    whole, damaged = (prefilled(solo, tokens[:LENGTH])[0] for _ in range(2))
    damage(solo, damaged)
    return max(
        distance(*(solo.decode(token.view(1), [sequence]) for sequence in (whole, damaged)))
        for token in tokens[LENGTH:]
    )


def layers_with(solo: Solo, name: str) -> list[int]:
    return [i for i, spec in enumerate(solo.model.layers) if name in {t.name for t in (*spec.rows, *spec.state)}]


def zero(name: str) -> Damage:
    """Forget one state tensor of every layer."""

    def damage(solo: Solo, sequence: SoloSequence) -> None:
        for layer in layers_with(solo, name):
            solo.memory.states(layer)[name][sequence.slot] = 0

    return damage


def roll_rows(name: str) -> Damage:
    """Give every token the row of the one before it."""

    def damage(solo: Solo, sequence: SoloSequence) -> None:
        for layer in layers_with(solo, name):
            write_rows(solo, sequence, layer, name, rows_of(solo, sequence, layer)[name].roll(1, 0))

    return damage


def test_without_damage_nothing_moves(checkpoint, tokens):
    assert harm(checkpoint, tokens, lambda _solo, _sequence: None) == 0


def test_each_kind_of_lost_state_is_seen(checkpoint, tokens):
    names = {tensor.name for spec in checkpoint.model.layers for tensor in spec.state}
    assert names
    for name in names:
        assert harm(checkpoint, tokens, zero(name)) > DAMAGE, name


@pytest.mark.parametrize("name", ["key", "value"])
def test_rows_off_by_one_token_are_seen(checkpoint, tokens, name):
    assert harm(checkpoint, tokens, roll_rows(name)) > DAMAGE
