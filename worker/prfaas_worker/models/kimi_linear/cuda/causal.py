"""MLA for the tokens of a chunk: keys and values of every head are expanded from the rows, then attended to by flash.

A long sequence's expanded keys would not fit (20 KB a token), so the rows before the chunk are taken in blocks, without
a mask; the chunk attends to itself causally. Each part comes with the logarithm of its softmax's sum, which joins them:
exact, and the causal mask never needs an offset.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812, the name that torch's own documentation gives it

# Rows expanded at once: 100 to 250 MB of keys at 32 heads of 192.
_BLOCK_ROWS = 8192


class Expansion(NamedTuple):
    """How rows become keys and values; see LatentWeights.expand."""

    weight: Tensor
    """Value before key [H, V + N, L]."""
    value: int
    key: int
    """N + S."""

    def __call__(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Rows [n, L + S] -> keys [1, H, n, N + S] and values of the same width, right in their first V columns.

        Flash attention wants one width. A head's key follows its value in memory, so wider values are a view that ends
        in columns nobody reads.
        """
        heads, width, latent = self.weight.shape
        expanded = F.linear(rows[:, :latent], self.weight.flatten(0, 1)).view(-1, heads, width)
        shared = rows[:, None, latent:].expand(-1, heads, -1)
        k = torch.cat([expanded[..., self.value :], shared], dim=-1)
        return _heads_first(k), _heads_first(expanded[..., : self.key])


class EarlierRows(NamedTuple):
    """The rows of a sequence before a chunk, in their pages."""

    pages: Tensor
    """The layer's rows [pages, page tokens, L + S]."""
    table: Tensor
    """Pages of the sequence, int64 [columns]."""
    count: int

    def blocks(self) -> Iterator[Tensor]:
        """Rows [n, L + S], in order."""
        page_tokens = self.pages.shape[1]
        step = max(1, _BLOCK_ROWS // page_tokens)
        pages = -(-self.count // page_tokens)
        for first in range(0, pages, step):
            rows = self.pages[self.table[first : min(first + step, pages)]].flatten(0, 1)
            yield rows[: self.count - first * page_tokens]


def attend_chunk(q: Tensor, own: Tensor, earlier: EarlierRows, expand: Expansion) -> Tensor:
    """Let the tokens of one chunk attend to themselves and to what stands before them.

    Args:
        q: queries [T, H, N + S].
        own: rows of the same tokens [T, L + S].
        earlier: rows before them.
        expand: makes keys and values of rows.

    Returns:
        [T, H, V].

    """
    queries, scale = _heads_first(q), expand.key**-0.5
    o, sums = _flash(queries, *expand(own), True, scale)
    o = o[..., : expand.value]
    if earlier.count:
        # Parts are joined in fp32: there are as many roundings as blocks.
        o = o.float()
    for rows in earlier.blocks():
        part, part_sums = _flash(queries, *expand(rows), False, scale)
        joined = torch.logaddexp(sums, part_sums)
        o.mul_((sums - joined).exp().unsqueeze(-1))
        o.addcmul_(part[..., : expand.value], (part_sums - joined).exp().unsqueeze(-1))
        sums = joined
    return o[0].transpose(0, 1).to(q.dtype)


def _heads_first(x: Tensor) -> Tensor:
    """[n, H, W] -> [1, H, n, W], without a copy."""
    return x.transpose(0, 1).unsqueeze(0)


def _flash(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Flash attention of [1, H, n, W] with the natural logarithms of the softmax's sums, fp32 [1, H, n].

    The functions behind scaled_dot_product_attention, which itself keeps the sums to itself.
    """
    if q.is_cuda and q.dtype == torch.float32:
        # Flash takes half precision only. Checks run in fp32, through the form whose sums are padded to whole blocks.
        given = torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, causal, scale=scale)
        return given[0], given[1][..., : q.shape[2]]
    if q.is_cuda:
        given = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, scale=scale)
    else:
        given = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)
    return given[0], given[1]
