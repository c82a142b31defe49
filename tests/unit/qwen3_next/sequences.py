"""Sequences on a memory that is full of NaN wherever nothing was written, and their bytes."""

import torch

from prfaas_worker.models.base import Model
from prfaas_worker.models.solo import Solo, SoloSequence

_NAN_BYTE = 255

_made: list[Solo] = []


def solo_of(model: Model, slots: int = 6, tokens: int = 256) -> Solo:
    """The model on a memory of the caller's own, in which reading what was not written gives NaN."""
    solo = Solo(model, slots=slots, tokens=tokens)
    solo.memory.pages.fill_(_NAN_BYTE)
    _made.append(solo)
    return solo


def scrub() -> None:
    """Take the NaN out of what was made: later tests get the same memory from the allocator."""
    for solo in _made:
        solo.memory.pages.zero_()
        solo.memory.slots.zero_()
    _made.clear()


def fresh(solo: Solo) -> SoloSequence:
    """An empty sequence, in a slot that held another."""
    sequence = solo.new()
    solo.memory.slots[sequence.slot].fill_(_NAN_BYTE)
    return sequence


def prefilled(solo: Solo, tokens: torch.Tensor, *sizes: int) -> tuple[SoloSequence, torch.Tensor]:
    """A sequence filled in chunks of these sizes (one chunk by default), and the logits after the last."""
    sequence = fresh(solo)
    for chunk in tokens.split(list(sizes) or [len(tokens)]):
        hidden = solo.prefill(chunk, sequence)
    return sequence, solo.model.logits(hidden)


def moved(source: Solo, sequence: SoloSequence, target: Solo) -> SoloSequence:
    """The sequence in another memory, other pages and another slot, made of its rows' and states' bytes alone."""
    target.new()  # so that the slots differ
    copy = fresh(target)
    copy.length = sequence.length
    here, there = source.pages(sequence).tolist(), target.pages(copy).tolist()
    span = 0, sequence.length
    for layer, spec in enumerate(source.model.layers):
        for name in (tensor.name for tensor in spec.rows):
            pieces = source.memory.row_bytes(layer, name, here, span)
            for piece, place in zip(pieces, target.memory.row_bytes(layer, name, there, span), strict=True):
                place[:] = bytes(piece)
        for name in (tensor.name for tensor in spec.state):
            target.memory.state_bytes(layer, name, copy.slot)[:] = bytes(
                source.memory.state_bytes(layer, name, sequence.slot)
            )
    return copy


def rows_of(solo: Solo, sequence: SoloSequence, layer: int) -> dict[str, torch.Tensor]:
    """A copy of a layer's rows, each [length, head, dim]."""
    pages = solo.pages(sequence)
    return {name: t[pages].flatten(0, 1)[: sequence.length] for name, t in solo.memory.rows(layer).items()}


def write_rows(solo: Solo, sequence: SoloSequence, layer: int, name: str, rows: torch.Tensor) -> None:
    """Put rows [length, head, dim] in the place of a sequence's own."""
    at = torch.arange(len(rows))
    solo.memory.rows(layer)[name][solo.memory.table[sequence.slot, at // 64], at % 64] = rows


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return (a - b).abs().max().item()
