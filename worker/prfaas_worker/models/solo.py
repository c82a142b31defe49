"""A model without an engine: sequences on a memory of their own, for benchmarks, tests and checks after training."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from prfaas_worker.cache.memory import CacheMemory
from prfaas_worker.cache_spec import CacheGeometry
from prfaas_worker.models.base import Batch, Chunk, Decodes, Model


@dataclass
class SoloSequence:
    slot: int
    length: int = 0


class Solo:
    """Binds a model to memory for `slots` sequences of up to `tokens` tokens; pages are spread as after long use."""

    def __init__(self, model: Model, *, slots: int = 8, tokens: int = 1024):
        self.model = model
        geometry = CacheGeometry(model.layers)
        per_slot = geometry.pages_for(tokens)
        self.memory = CacheMemory(
            geometry, num_pages=slots * per_slot, num_slots=slots, max_context=tokens, device=model.device
        )
        for slot in range(slots):
            self.memory.set_pages(slot, 0, range(slots * per_slot - 1 - slot, -1, -slots))
        self._free = list(range(slots - 1, -1, -1))
        model.bind(self.memory)

    def new(self) -> SoloSequence:
        sequence = SoloSequence(self._free.pop())
        self.memory.clear_slot(sequence.slot)
        return sequence

    def drop(self, sequence: SoloSequence) -> None:
        self._free.append(sequence.slot)

    def pages(self, sequence: SoloSequence) -> torch.Tensor:
        return self.memory.table[sequence.slot, : self.memory.geometry.pages_for(sequence.length)]

    def prefill(
        self, tokens: torch.Tensor, sequence: SoloSequence, on_layer: Callable[[int], None] | None = None
    ) -> torch.Tensor:
        """Append tokens, int64 [T]; returns the last one's hidden state, fp32 [hidden_size]."""
        chunk = Chunk(sequence.slot, sequence.length, len(tokens))
        (hidden,) = self.model.forward(Batch(tokens, (chunk,)), on_layer)
        sequence.length = chunk.end
        return hidden

    def decode(self, tokens: torch.Tensor, sequences: Sequence[SoloSequence]) -> torch.Tensor:
        """Append tokens[b] to sequences[b]; returns logits fp32 [B, vocab_size]."""
        lengths = [sequence.length for sequence in sequences]
        slots = torch.tensor([sequence.slot for sequence in sequences], device=self.model.device)
        decodes = Decodes(slots, torch.tensor(lengths, device=self.model.device), max(lengths))
        hidden = self.model.forward(Batch(tokens, (), decodes))
        for sequence in sequences:
            sequence.length += 1
        return self.model.logits(hidden)
