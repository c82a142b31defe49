"""The largest numbers of long rows, in order, without sorting the rows.

The k largest stand in at most k blocks of 64 numbers: those with the largest peaks. So one pass finds the peaks, and
only k blocks are looked into. Of equal numbers those further left come first, whatever library or device sorts: numbers
and their places become keys, of which no two are equal.
"""

from typing import Final

import numpy as np
import torch
from torch.nn.functional import pad

BLOCK: Final = 64
_WORTH: Final = 2  # with fewer blocks than so many times k, most would be looked into anyway
_PLACES: Final = 0xFFFF_FFFF


def largest(numbers: torch.Tensor, depth: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the `depth` largest of each row and where they stand, [R, depth], from fp32 [R, a multiple of BLOCK]."""
    if numbers.shape[1] // BLOCK <= _WORTH * depth:
        return _sorted(numbers, torch.arange(numbers.shape[1], device=numbers.device), depth)
    blocks = numbers.unflatten(1, (-1, BLOCK))
    places = torch.arange(max(BLOCK, blocks.shape[1]), device=numbers.device)
    _, chosen = _sorted(blocks.amax(-1), places[: blocks.shape[1]], depth)
    inside = blocks.gather(1, chosen[..., None].expand(-1, -1, BLOCK))
    return _sorted(inside.flatten(1), (chosen[..., None] * BLOCK + places[:BLOCK]).flatten(1), depth)


def padded(numbers: torch.Tensor, filler: float) -> torch.Tensor:
    """Return rows widened to whole blocks."""
    missing = -numbers.shape[1] % BLOCK
    return pad(numbers, (0, missing), value=filler) if missing else numbers


def _sorted(numbers: torch.Tensor, places: torch.Tensor, depth: int) -> tuple[torch.Tensor, torch.Tensor]:
    # Turned so, the bits of floats are integers in the floats' order; the place beneath them settles ties.
    keys = places - (_turn(numbers.view(torch.int32)).long() << 32)
    keys = _smallest_keys(keys, depth)
    places = keys & _PLACES
    return _turn((places - keys >> 32).int()).view(torch.float32), places


def _turn(bits: torch.Tensor) -> torch.Tensor:
    """Turn the bits of negative floats over, and back."""
    return bits ^ (bits >> 31 & 0x7FFF_FFFF)


def _smallest_keys(keys: torch.Tensor, depth: int) -> torch.Tensor:
    if keys.device.type != "cpu":
        return keys.topk(depth, dim=-1, largest=False).values if depth < keys.shape[1] else keys.sort(dim=-1).values
    # numpy sorts with vector instructions: a tenth of torch's time.
    array = keys.numpy()
    if depth < keys.shape[1]:
        array = np.partition(array, depth - 1, axis=-1)[:, :depth]
    return torch.from_numpy(np.sort(array, axis=-1))
