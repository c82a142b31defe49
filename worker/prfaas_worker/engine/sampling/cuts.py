"""Temperature, min_p, top_k, top_p and the draw itself, for many rows at once without sorting whole vocabularies.

Each cut is taken on what the one before left (the order of vLLM): temperature, min_p, top_k, top_p. Where tokens are
equally likely the lower id counts as the likelier. The token is found by inverting the distribution function over what
is left, in the order of ids: a last bit that differs in the logits then moves a bound by as little, while in the order
of likelihood it could swap two tokens.

No row may feel which others share its batch, but floating sums depend on their order, and that on shapes. So
probabilities become whole numbers of 2^-52: sums of those are exact in float64 in any order (below 2^53).

No cut sorts a vocabulary: top_p, which does not know how many tokens it will keep, begins with the likeliest few, and
takes more where those do not reach.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

import torch

from prfaas_worker.engine.sampling.largest import BLOCK, largest, padded

DEPTHS: Final = (128, 1024, 16_384)
"""How many of the likeliest tokens a cut looks at; then at all."""
_NARROW: Final = 2048  # a vocabulary that is sorted at once
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
    """The same for several rows: columns [R] on the logits' device, `top_k` infinite where all are kept."""

    rows: torch.Tensor
    heat: torch.Tensor
    min_p: torch.Tensor | None
    top_k: torch.Tensor
    top_p: torch.Tensor
    uniform: torch.Tensor


def draw_rows(logits: torch.Tensor, tops: torch.Tensor, cuts: Sequence[Cut]) -> list[int]:
    """Draw one token for each cut from its row of `logits`, fp32 [B, vocab_size], with finite maxima `tops` [B]."""
    width = logits.shape[1]
    found: dict[int, int] = {}
    plain = [cut for cut in cuts if not _cuts_off(cut, width)]
    for chunk in _chunks(plain, logits):
        columns = _columns(chunk, logits)
        tokens = _draw_anywhere(_weights(logits, tops, columns), columns.uniform)
        found.update(zip((cut.row for cut in chunk), tokens.tolist(), strict=True))
    pending = [cut for cut in cuts if _cuts_off(cut, width)]
    for depth in (*(depth for depth in DEPTHS if width > _NARROW and depth < width), width):
        deeper = [cut for cut in pending if depth < cut.top_k < width]
        for chunk in _chunks([cut for cut in pending if not depth < cut.top_k < width], logits):
            columns = _columns(chunk, logits)
            tokens, reached = _draw_likeliest(_weights(logits, tops, columns), columns, depth)
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
    rows, heat, min_p, *others = torch.tensor(numbers, dtype=torch.float64, device=logits.device).T
    return _Cuts(rows.long(), heat, min_p if any(cut.min_p for cut in cuts) else None, *others)


def _weights(logits: torch.Tensor, tops: torch.Tensor, cuts: _Cuts) -> torch.Tensor:
    """Probabilities after temperature and min_p as whole numbers in fp32, [R, vocab_size rounded up to blocks]."""
    # The maximum first: then nothing overflows at a tiny temperature.
    scaled = logits.index_select(0, cuts.rows).sub_(tops[cuts.rows, None]).mul_(cuts.heat[:, None].float())
    weights = torch.softmax(scaled, dim=-1).mul_(_ONE).floor_()
    if cuts.min_p is not None:
        least = weights.amax(-1, keepdim=True) * cuts.min_p[:, None].float()
        weights.masked_fill_(weights < least, 0)
    return padded(weights, 0)


def _draw_anywhere(weights: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Return each row's first token below which, itself included, more than `uniform` of the weight lies."""
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


def _draw_likeliest(weights: torch.Tensor, cuts: _Cuts, depth: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw from what top_k and top_p leave of the `depth` likeliest tokens; also say for which rows that was enough."""
    values, ids = largest(weights, depth)
    rank = torch.arange(values.shape[1], device=values.device)
    values = values.double().masked_fill_(rank >= cuts.top_k[:, None], 0)
    cumulative = values.cumsum(-1)
    limited = cuts.top_k <= values.shape[1]
    wanted = torch.where(limited, cumulative[:, -1], weights.sum(-1, dtype=torch.float64)) * cuts.top_p
    # top_p keeps every token before which less than top_p has gathered, and always the first.
    left_out = cumulative - values >= wanted[:, None]
    left_out[:, 0] = False
    reached = limited | (cumulative[:, -1] >= wanted)
    kept = weights.zero_().scatter_(1, ids, values.masked_fill_(left_out, 0).float())
    return _draw_anywhere(kept, cuts.uniform), reached
