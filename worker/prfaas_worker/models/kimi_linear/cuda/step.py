"""Where every token of a batch stands, worked out once a step for all layers, on the device.

A row of a step whose slot is `PADDING` belongs to no sequence: kernels read and write no cache for it. So a captured
graph can run with fewer sequences than it has rows, and nothing need be reserved for the others.
"""

from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812, the name that torch's own documentation gives it

from prfaas_worker.models.base import Batch, Chunk, Decodes

PADDING = -1


class Step(NamedTuple):
    """A batch of N tokens, the first P of which belong to C chunks; everything int64 and on the device, but
    `ends_host`.

    Attributes:
        slots: slot of each token [N].
        positions: place of each token in its sequence [N].
        offsets: place of each token in its chunk [P].
        chunk_slots: slot of each chunk [C].
        ends: chunk i holds tokens ends[i] up to ends[i + 1], [C + 1].
        ends_host: the same in host memory.
        outputs: the tokens whose hidden states are asked for; None where it is all of them.

    """

    chunks: tuple[Chunk, ...]
    decodes: Decodes | None
    slots: Tensor
    positions: Tensor
    offsets: Tensor
    chunk_slots: Tensor
    ends: Tensor
    ends_host: Tensor
    outputs: Tensor | None

    @property
    def prefilled(self) -> int:
        """Tokens of chunks, P."""
        return self.offsets.shape[0]


def decode_step(decodes: Decodes) -> Step:
    """Describe a step of decodes alone; made of device tensors only, so that it can stand inside a captured graph."""
    none, host = decodes.slots.new_empty(0), torch.zeros(1, dtype=torch.int64)
    return Step((), decodes, decodes.slots, decodes.lengths, none, none, none, host, None)


def plan_step(batch: Batch) -> Step:
    """Describe any batch that has chunks; its tokens are on the device."""
    device = batch.tokens.device
    ends = [0, *accumulate(chunk.tokens for chunk in batch.chunks)]
    facts = torch.tensor([[c.slot, c.start, c.tokens, begin] for c, begin in zip(batch.chunks, ends, strict=False)])
    # Kernels take each of these as it lies in memory; pinned, the copy waits for nothing that the device does.
    facts = facts.T.contiguous()
    facts = facts.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else facts.to(device)
    chunk_slots, starts, counts, begins = facts
    of_token = torch.repeat_interleave(counts, output_size=ends[-1])
    slots, offsets = chunk_slots[of_token], torch.arange(ends[-1], device=device) - begins[of_token]
    positions, outputs = starts[of_token] + offsets, begins + counts - 1
    if (decodes := batch.decodes) is not None:
        slots, positions = torch.cat([slots, decodes.slots]), torch.cat([positions, decodes.lengths])
        outputs = torch.cat([outputs, torch.arange(ends[-1], slots.shape[0], device=device)])
    ends_device = F.pad(counts.cumsum(0), (1, 0))
    return Step(batch.chunks, decodes, slots, positions, offsets, chunk_slots, ends_device, torch.tensor(ends), outputs)
