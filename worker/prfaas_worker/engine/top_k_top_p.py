"""Draws tokens by temperature, min_p, top_k and top_p, for many rows at once and without sorting whole vocabularies.

Each filter applies to what the one before left (the order of vLLM): temperature, min_p, top_k, top_p. Of equally likely
tokens the lower id counts as the likelier. The token is found by inverting the distribution function over what is left,
in the order of ids. A last bit that differs in the logits then moves a bound by as little. In the order of likelihood
it could swap two tokens.

No row may depend on which others share its batch, but floating sums depend on their order, and that on shapes. So
probabilities become whole numbers of 2^-52: sums of those are exact in float64 in any order (below 2^53).

top_p does not know how many tokens it will keep. It begins with the likeliest few, and takes more where those do not
reach. The k largest numbers of a row are in at most k blocks of 64: those with the largest peaks. So one pass finds the
peaks, and only k blocks are searched. Of equal numbers the leftmost come first, whatever library or device sorts.
Numbers and their places become keys, of which no two are equal.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import torch
from torch.nn.functional import pad

DEPTHS: Final = (128, 1024, 16_384)
"""Numbers of likeliest tokens to search, one after the other; then the whole vocabulary."""
_NARROW: Final = 2048  # a vocabulary that is sorted at once
_ONE: Final = 2.0**52
_CHUNK_NUMBERS: Final = 1 << 19  # on a processor: temporaries of a few rows stay in its caches
_DEVICE_CHUNK_NUMBERS: Final = 1 << 26
_COLDEST: Final = 1e-30
BLOCK: Final = 64
_WORTH: Final = 2  # with fewer blocks than so many times k, most would be looked into anyway
_PLACES: Final = 0xFFFF_FFFF


class RowDraw(NamedTuple):
    """The parameters of one row's draw. `top_k` 0 keeps all; `uniform` is the row's random number."""

    row: int
    temperature: float
    min_p: float
    top_k: int
    top_p: float
    uniform: float


class _Columns(NamedTuple):
    """The parameters of several rows: columns [R] on the logits' device, `top_k` infinite to keep all."""

    rows: torch.Tensor
    heat: torch.Tensor
    min_p: torch.Tensor | None
    top_k: torch.Tensor
    top_p: torch.Tensor
    uniform: torch.Tensor


def draw_rows(logits: torch.Tensor, tops: torch.Tensor, draws: Sequence[RowDraw]) -> list[int]:
    """Make each draw from its row of `logits`, fp32 [B, vocab_size], with finite maxima `tops` [B]."""
    width = logits.shape[1]
    found: dict[int, int] = {}
    plain = [draw for draw in draws if not _is_truncated(draw, width)]
    for chunk in _chunks(plain, logits):
        columns = _columns(chunk, logits)
        tokens = _draw_anywhere(_weights(logits, tops, columns), columns.uniform)
        found.update(zip((draw.row for draw in chunk), tokens.tolist(), strict=True))
    pending = [draw for draw in draws if _is_truncated(draw, width)]
    for depth in (*(depth for depth in DEPTHS if width > _NARROW and depth < width), width):
        deeper = [draw for draw in pending if depth < draw.top_k < width]
        for chunk in _chunks([draw for draw in pending if not depth < draw.top_k < width], logits):
            columns = _columns(chunk, logits)
            tokens, reached = _draw_likeliest(_weights(logits, tops, columns), columns, depth)
            for draw, token, done in zip(chunk, tokens.tolist(), reached.tolist(), strict=True):
                if done or depth == width:
                    found[draw.row] = token
                else:
                    deeper.append(draw)
        pending = deeper
    return [found[draw.row] for draw in draws]


def _is_truncated(draw: RowDraw, width: int) -> bool:
    return draw.top_p < 1 or 0 < draw.top_k < width


def _chunks(draws: Sequence[RowDraw], logits: torch.Tensor) -> list[Sequence[RowDraw]]:
    numbers = _CHUNK_NUMBERS if logits.device.type == "cpu" else _DEVICE_CHUNK_NUMBERS
    rows = max(1, numbers // logits.shape[1])
    return [draws[start : start + rows] for start in range(0, len(draws), rows)]


def _columns(draws: Sequence[RowDraw], logits: torch.Tensor) -> _Columns:
    numbers = [
        (draw.row, 1 / max(draw.temperature, _COLDEST), draw.min_p, draw.top_k or torch.inf, draw.top_p, draw.uniform)
        for draw in draws
    ]
    rows, heat, min_p, *others = torch.tensor(numbers, dtype=torch.float64, device=logits.device).T
    return _Columns(rows.long(), heat, min_p if any(draw.min_p for draw in draws) else None, *others)


def _weights(logits: torch.Tensor, tops: torch.Tensor, columns: _Columns) -> torch.Tensor:
    """Probabilities after temperature and min_p as whole numbers in fp32, [R, vocab_size rounded up to blocks]."""
    # The maximum first: then nothing overflows at a tiny temperature.
    scaled = logits.index_select(0, columns.rows).sub_(tops[columns.rows, None]).mul_(columns.heat[:, None].float())
    weights = torch.softmax(scaled, dim=-1).mul_(_ONE).floor_()
    if columns.min_p is not None:
        least = weights.amax(-1, keepdim=True) * columns.min_p[:, None].float()
        weights.masked_fill_(weights < least, 0)
    return pad_to_blocks(weights, 0)


def _draw_anywhere(weights: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Return each row's first token whose cumulative weight exceeds `uniform` of the total."""
    blocks = weights.unflatten(1, (-1, BLOCK))
    sums = blocks.sum(-1, dtype=torch.float64)
    cumulative = sums.cumsum(-1)
    total = cumulative[:, -1:]
    # Rounding must not reach the total, above which there is no token.
    target = torch.minimum((uniform[:, None] * total).floor_(), total - 1)
    block = (cumulative <= target).sum(-1, keepdim=True)
    inside = blocks.gather(1, block[..., None].expand(-1, -1, BLOCK))[:, 0].double()
    before = (cumulative - sums).gather(1, block)
    offset = (inside.cumsum(-1) + before <= target).sum(-1)
    return block[:, 0] * BLOCK + offset


def _draw_likeliest(weights: torch.Tensor, columns: _Columns, depth: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw from the `depth` likeliest tokens by top_k and top_p; also return in which rows `depth` was enough."""
    values, ids = largest(weights, depth)
    rank = torch.arange(values.shape[1], device=values.device)
    values = values.double().masked_fill_(rank >= columns.top_k[:, None], 0)
    cumulative = values.cumsum(-1)
    limited = columns.top_k <= values.shape[1]
    wanted = torch.where(limited, cumulative[:, -1], weights.sum(-1, dtype=torch.float64)) * columns.top_p
    # top_p keeps every token before which less than top_p has gathered, and always the first.
    left_out = cumulative - values >= wanted[:, None]
    left_out[:, 0] = False
    reached = limited | (cumulative[:, -1] >= wanted)
    kept = weights.zero_().scatter_(1, ids, values.masked_fill_(left_out, 0).float())
    return _draw_anywhere(kept, columns.uniform), reached


def largest(numbers: torch.Tensor, depth: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the `depth` largest of each row and their positions, [R, depth], from fp32 [R, a multiple of BLOCK]."""
    if numbers.shape[1] // BLOCK <= _WORTH * depth:
        return _sorted(numbers, torch.arange(numbers.shape[1], device=numbers.device), depth)
    blocks = numbers.unflatten(1, (-1, BLOCK))
    places = torch.arange(max(BLOCK, blocks.shape[1]), device=numbers.device)
    _, chosen = _sorted(blocks.amax(-1), places[: blocks.shape[1]], depth)
    inside = blocks.gather(1, chosen[..., None].expand(-1, -1, BLOCK))
    return _sorted(inside.flatten(1), (chosen[..., None] * BLOCK + places[:BLOCK]).flatten(1), depth)


def pad_to_blocks(numbers: torch.Tensor, filler: float) -> torch.Tensor:
    missing = -numbers.shape[1] % BLOCK
    return pad(numbers, (0, missing), value=filler) if missing else numbers


def _sorted(numbers: torch.Tensor, places: torch.Tensor, depth: int) -> tuple[torch.Tensor, torch.Tensor]:
    # Turned so, the bits of floats are integers in the floats' order; the place beneath them settles ties.
    keys = places - (_turn(numbers.view(torch.int32)).long() << 32)
    keys = _smallest_keys(keys, depth)
    places = keys & _PLACES
    return _turn((places - keys >> 32).int()).view(torch.float32), places


def _turn(bits: torch.Tensor) -> torch.Tensor:
    return bits ^ (bits >> 31 & 0x7FFF_FFFF)


def _smallest_keys(keys: torch.Tensor, depth: int) -> torch.Tensor:
    if keys.device.type != "cpu":
        return keys.topk(depth, dim=-1, largest=False).values if depth < keys.shape[1] else keys.sort(dim=-1).values
    # numpy sorts with vector instructions: a tenth of torch's time.
    array = keys.numpy()
    if depth < keys.shape[1]:
        array = np.partition(array, depth - 1, axis=-1)[:, :depth]
    return torch.from_numpy(np.sort(array, axis=-1))
