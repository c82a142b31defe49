"""Temperature, min_p, top_k, top_p and the draw itself, for many rows at once without sorting whole vocabularies.

Each cut is taken on what the one before left (the order of vLLM): temperature, min_p, top_k, top_p. Where tokens are
equally likely the lower id counts as the likelier. The token is found by inverting the distribution function over what
is left, in the order of ids: a last bit that differs in the logits then moves a bound by as little, while in the order
of likelihood it could swap two tokens.

No row may feel which others share its batch, but floating sums depend on their order, and that on shapes. So
probabilities become whole numbers of 2^-52: sums of those are exact in float64 in any order (below 2^53).

The k likeliest tokens stand in at most k blocks of 64 tokens: those with the largest peaks. So a cut looks at peaks,
then at k blocks; top_p, which has no k, begins with a small one and takes more where its tokens do not reach.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

import torch
from torch.nn.functional import pad

BLOCK: Final = 64
DEPTHS: Final = (128, 4096)
"""How many of the likeliest tokens a cut looks at; then at all."""
_ONE: Final = 2.0**52
_CHUNK_NUMBERS: Final = 1 << 19  # on a processor: temporaries of a few rows stay in its caches
_DEVICE_CHUNK_NUMBERS: Final = 1 << 26
_COLDEST: Final = 1e-30


class Cut(NamedTuple):
    """One row's question. `top_k` 0 keeps all; `uniform` is the row's random number."""

    row: int
    temperature: float
    min_p: float
    top_k: int
    top_p: float
    uniform: float


class _Cuts(NamedTuple):
    """The same for several rows, as columns [R] on the logits' device; `top_k` infinite where all are kept."""

    rows: torch.Tensor
    heat: torch.Tensor
    min_p: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    uniform: torch.Tensor


def draw_rows(logits: torch.Tensor, tops: torch.Tensor, cuts: Sequence[Cut]) -> list[int]:
    """Draw one token for each cut from its row of `logits`, fp32 [B, vocab_size], with finite maxima `tops` [B]."""
    width = logits.shape[1]
    found: dict[int, int] = {}
    plain = [cut for cut in cuts if not _cuts_off(cut, width)]
    for chunk in _chunks(plain, logits):
        tokens = _invert(*_blocks(_weights(logits, tops, chunk)), _columns(chunk, logits).uniform)
        found.update(zip((cut.row for cut in chunk), tokens.tolist(), strict=True))
    pending = [cut for cut in cuts if _cuts_off(cut, width)]
    for depth in (*(depth for depth in DEPTHS if depth < width), width):
        deeper = [cut for cut in pending if depth < cut.top_k < width]
        for chunk in _chunks([cut for cut in pending if not depth < cut.top_k < width], logits):
            tokens, reached = _draw_likeliest(_weights(logits, tops, chunk), _columns(chunk, logits), depth)
            for cut, token, done in zip(chunk, tokens.tolist(), reached.tolist(), strict=True):
                if done or depth == width:
                    found[cut.row] = token
                else:
                    deeper.append(cut)
        pending = deeper
    return [found[cut.row] for cut in cuts]


def _cuts_off(cut: Cut, width: int) -> bool:
    return cut.top_p < 1 or 0 < cut.top_k < width


def _chunks(cuts: Sequence[Cut], logits: torch.Tensor) -> list[Sequence[Cut]]:
    numbers = _CHUNK_NUMBERS if logits.device.type == "cpu" else _DEVICE_CHUNK_NUMBERS
    rows = max(1, numbers // logits.shape[1])
    return [cuts[start : start + rows] for start in range(0, len(cuts), rows)]


def _columns(cuts: Sequence[Cut], logits: torch.Tensor) -> _Cuts:
    numbers = [
        (cut.row, 1 / max(cut.temperature, _COLDEST), cut.min_p, cut.top_k or torch.inf, cut.top_p, cut.uniform)
        for cut in cuts
    ]
    rows, *others = torch.tensor(numbers, dtype=torch.float64, device=logits.device).T
    return _Cuts(rows.long(), *others)


def _weights(logits: torch.Tensor, tops: torch.Tensor, cuts: Sequence[Cut]) -> torch.Tensor:
    """Probabilities after temperature and min_p as whole numbers in fp32, [R, vocab_size rounded up to blocks]."""
    columns = _columns(cuts, logits)
    # The maximum first: then nothing overflows at a tiny temperature.
    scaled = logits.index_select(0, columns.rows).sub_(tops[columns.rows, None]).mul_(columns.heat[:, None].float())
    weights = torch.softmax(scaled, dim=-1).mul_(_ONE).floor_()
    if any(cut.min_p > 0 for cut in cuts):
        least = weights.amax(-1, keepdim=True) * columns.min_p[:, None].float()
        weights.masked_fill_(weights < least, 0)
    return pad(weights, (0, -weights.shape[1] % BLOCK)) if weights.shape[1] % BLOCK else weights


def _blocks(weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return weights [R, blocks, BLOCK] and each block's sum, float64 [R, blocks]."""
    blocks = weights.unflatten(1, (-1, BLOCK))
    return blocks, blocks.sum(-1, dtype=torch.float64)


def _invert(blocks: torch.Tensor, sums: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Return each row's first token below which, itself included, more than `uniform` of the weight lies."""
    cumulative = sums.cumsum(-1)
    target = _target(uniform, cumulative[:, -1:])
    block = (cumulative <= target).sum(-1, keepdim=True)
    inside = blocks.gather(1, block[..., None].expand(-1, -1, BLOCK))[:, 0].double()
    before = (cumulative - sums).gather(1, block)
    offset = (inside.cumsum(-1) + before <= target).sum(-1)
    return block[:, 0] * BLOCK + offset


def _target(uniform: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    # Rounding must not reach the total, above which there is no token.
    return torch.minimum((uniform[:, None] * total).floor(), total - 1)


def _draw_likeliest(weights: torch.Tensor, cuts: _Cuts, depth: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw from what top_k and top_p leave of the `depth` likeliest tokens; also say for which rows that was enough."""
    blocks, sums = _blocks(weights)
    values, ids = _likeliest(blocks, depth)
    rank = torch.arange(values.shape[1], device=values.device)
    values = values.double().masked_fill_(rank >= cuts.top_k[:, None], 0)
    cumulative = values.cumsum(-1)
    limited = cuts.top_k <= values.shape[1]
    wanted = torch.where(limited, cumulative[:, -1], sums.sum(-1)) * cuts.top_p
    # top_p keeps every token before which less than top_p has gathered, and always the first.
    left_out = cumulative - values >= wanted[:, None]
    left_out[:, 0] = False
    reached = limited | (cumulative[:, -1] >= wanted)
    ids, order = ids.sort(-1)
    cumulative = values.masked_fill_(left_out, 0).gather(1, order).cumsum(-1)
    index = (cumulative <= _target(cuts.uniform, cumulative[:, -1:])).sum(-1, keepdim=True)
    return ids.gather(1, index)[:, 0], reached


def _likeliest(blocks: torch.Tensor, depth: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the `depth` largest weights, fp32 [R, depth], of equal ones the lower ids first, and their ids."""
    rows, count, _ = blocks.shape
    if count <= 2 * depth:
        ids = torch.arange(count * BLOCK, device=blocks.device).expand(rows, -1)
        return _largest(blocks.flatten(1), ids, depth)
    _, chosen = _largest(blocks.amax(-1), torch.arange(count, device=blocks.device).expand(rows, -1), depth)
    ids = chosen[..., None] * BLOCK + torch.arange(BLOCK, device=blocks.device)
    inside = blocks.gather(1, chosen[..., None].expand(-1, -1, BLOCK))
    return _largest(inside.flatten(1), ids.flatten(1), depth)


def _largest(values: torch.Tensor, ids: torch.Tensor, depth: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the largest values, all at least 0, and their ids."""
    # The bits of floats that are not negative are in the floats' own order; with the id beneath, no two are equal.
    keys = (values.view(torch.int32).long() << 32) - ids
    keys = keys.topk(depth, dim=-1).values if depth < keys.shape[1] else keys.sort(dim=-1, descending=True).values
    ids = -keys & 0xFFFF_FFFF
    return ((keys + ids) >> 32).int().view(torch.float32), ids
