"""Computes an MLA layer, without positions. Its cache row is the normed latent, then the key part that all heads share.

A chunk attends in two ways. To its own tokens: keys and values are made of its rows, as the checkpoint says. To tokens
before it: block by block of rows, so that memory does not follow the length. Each block's output is weighted by its
share of the whole (the log of the sum of its exponentials). There, and in decode, kv_b_proj may be *absorbed* into the
query and the output. Then rows are used as they are, which is cheaper where queries are few.
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812, the name that torch's own documentation gives it

from prfaas_worker.models.kimi_linear.checkpoint import Weights
from prfaas_worker.models.kimi_linear.config import KimiLinearConfig
from prfaas_worker.models.kimi_linear.layers import least_norm, linear, norm_scale, unit_rms

# transformers and the authors' code use 1e-6 here, whatever rms_norm_eps is.
_LATENT_NORM_EPS = 1e-6
# Projections with kv_b_proj multiplied in are kept beside the others if they have at most so many numbers.
_KEPT_ABSORBED = 1 << 20
# Bytes of scores that are formed at once where torch has no attention for the device that gives their sums.
_SCORE_BYTES = 64 << 20


class LatentAttention:
    def __init__(self, config: KimiLinearConfig, weights: Weights, norm: Tensor):
        self._heads = config.num_heads
        self._latent, self._shared = config.latent_size, config.shared_key_size
        self._nope, self._value = config.nope_size, config.value_size
        self._width = self._latent + self._shared
        self._scale = config.key_size**-0.5
        self._input = weights.product(["q_proj", "kv_a_proj_with_mqa"], columns=norm)
        self._latent_least = least_norm(_LATENT_NORM_EPS, self._latent, weights.device)
        self._latent_norm = norm_scale(weights["kv_a_layernorm"])
        # [H, nope + value, latent]: what each head makes of a latent.
        self._kv_b = weights["kv_b_proj"].unflatten(0, (self._heads, self._nope + self._value))
        self._o_proj = weights.product(["o_proj"])
        self._absorbed_input = self._absorbed_output = None
        if self._heads * self._width * config.hidden_size <= _KEPT_ABSORBED:
            self._absorbed_input, self._absorbed_output = self._absorb_projections()

    def prefill(self, x: Tensor) -> Tensor:
        """Sequences [B, T, D] without a past -> outputs [B, T, D]."""
        q, rows = self.project(x)
        k, v = self._keys_and_values(rows)
        o = F.scaled_dot_product_attention(q.transpose(1, 2), k, v, is_causal=True, scale=self._scale)
        return self.output(o[..., : self._value].transpose(1, 2))

    def project(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens [..., D] -> queries [..., H, key] and cache rows [..., latent + shared]."""
        joined = linear(x, self._input)
        q, row = torch.split_with_sizes(joined, [self._heads * (self._nope + self._shared), self._width], dim=-1)
        return q.unflatten(-1, (self._heads, -1)), self._row(row)

    def project_step(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens [B, D] -> absorbed queries [B, H, latent + shared] and cache rows [B, latent + shared]."""
        if self._absorbed_input is None:
            q, row = self.project(x)
            return self.absorb(q), row
        joined = F.linear(x, self._absorbed_input)
        q, row = torch.split_with_sizes(joined, [self._heads * self._width, self._width], dim=-1)
        return q.view(-1, self._heads, self._width), self._row(row)

    def absorb(self, q: Tensor) -> Tensor:
        """Queries [B, H, key] -> queries for rows as they are, scaled [B, H, latent + shared]."""
        nope, shared = q.split([self._nope, self._shared], dim=-1)
        latent = torch.bmm(nope.transpose(0, 1), self._kv_b[:, : self._nope])
        return torch.cat([latent.transpose(0, 1), shared], dim=-1) * self._scale

    def attend_own(self, q: Tensor, rows: Tensor, blocks: Iterator[Tensor]) -> Tensor:
        """Queries [T, H, key] attend to the rows of their own tokens [T, width], and to all earlier rows. `blocks`
        yields the earlier rows, [n, width] each. Returns values by head [T, H, value]."""
        q = q.transpose(0, 1).unsqueeze(0)
        k, v = self._keys_and_values(rows.unsqueeze(0))
        merged = Merged(*attend(q, k, v, self._scale, causal=True))
        few = q.shape[2] * (2 * self._latent - self._nope - self._value) < (self._nope + self._value) * self._latent
        for block in blocks:
            merged.add(*(self._attend_absorbed(q, block) if few else self._attend_block(q, block)))
        return merged.output[0, ..., : self._value].transpose(0, 1)

    def scores(self, q: Tensor, rows: Tensor, beyond: Tensor | None) -> Tensor:
        """Score rows [B, N, width] by one absorbed query a sequence [B, H, width]: [B, H, N]. `beyond`, floats [B, 1,
        N], is about 0 where a sequence has a row, and far below any score elsewhere."""
        return torch.bmm(q, rows.mT) if beyond is None else torch.baddbmm(beyond, q, rows.mT)

    def weighted(self, scores: Tensor, rows: Tensor) -> Tensor:
        """Scores [B, H, N] of rows [B, N, width] -> a latent by head [B, H, latent]."""
        return torch.bmm(scores.softmax(-1), rows[..., : self._latent])

    def values(self, latents: Tensor) -> Tensor:
        """Latents by head [B, H, latent] -> values by head [B, H, value]."""
        return torch.bmm(latents.transpose(0, 1), self._kv_b[:, self._nope :].mT).transpose(0, 1)

    def output(self, o: Tensor) -> Tensor:
        """Project values by head [..., H, value] to [..., D]."""
        return linear(o.flatten(-2), self._o_proj)

    def output_step(self, latents: Tensor) -> Tensor:
        """Project latents by head [B, H, latent] to [B, D]."""
        if self._absorbed_output is None:
            return self.output(self.values(latents))
        return F.linear(latents.flatten(1), self._absorbed_output)

    def _row(self, row: Tensor) -> Tensor:
        latent, shared = torch.split_with_sizes(row, [self._latent, self._shared], dim=-1)
        return torch.cat([unit_rms(latent, self._latent_least) * self._latent_norm, shared], dim=-1)

    def _keys_and_values(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Rows [B, N, latent + shared] -> keys and values [B, H, N, key]; values end in zeros. With one width for both,
        scaled_dot_product_attention takes its flash path, several times quicker on a CPU."""
        latent, shared = rows.split([self._latent, self._shared], dim=-1)
        expanded = F.linear(latent, self._kv_b.flatten(0, 1)).unflatten(-1, (self._heads, -1)).transpose(1, 2)
        k_nope, v = expanded.split([self._nope, self._value], dim=-1)
        k = torch.cat([k_nope, shared.unsqueeze(1).expand(-1, self._heads, -1, -1)], dim=-1)
        return k, F.pad(v, (0, max(0, k.shape[-1] - self._value)))

    def _attend_block(self, q: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Queries [1, H, T, key] attend to all of rows [n, width]: values [1, H, T, key], log sums [1, H, T]."""
        return attend(q, *self._keys_and_values(rows.unsqueeze(0)), self._scale, causal=False)

    def _attend_absorbed(self, q: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """`_attend_block` with kv_b_proj absorbed: all heads of all queries share the rows."""
        _, heads, tokens, _ = q.shape
        absorbed = self.absorb(q[0].transpose(0, 1)).flatten(0, 1)[None, None]
        latents, log_sums = attend(absorbed, rows[None, None], rows[None, None], 1.0, causal=False)
        values = self.values(latents.view(tokens, heads, -1)[..., : self._latent])
        values = F.pad(values, (0, q.shape[-1] - self._value))
        return values.transpose(0, 1).unsqueeze(0), log_sums.view(tokens, heads).T.unsqueeze(0)

    def _absorb_projections(self) -> tuple[Tensor, Tensor]:
        """From tokens to absorbed queries and rows [(H + 1) width, D], from latents to outputs [D, H latent]."""
        q, row = self._input.float().split([self._heads * (self._nope + self._shared), self._width])
        q = q.unflatten(0, (self._heads, -1))
        latent = self._kv_b[:, : self._nope].mT @ q[:, : self._nope]
        absorbed = self._scale * torch.cat([latent, q[:, self._nope :]], dim=1).flatten(0, 1)
        output = self._o_proj.float().unflatten(1, (self._heads, -1)).transpose(0, 1) @ self._kv_b[:, self._nope :]
        return torch.cat([absorbed, row]), output.transpose(0, 1).flatten(1)


class Merged:
    """Combines attention over several sets of rows: `output` [..., T, V]."""

    def __init__(self, output: Tensor, log_sum: Tensor):
        self.output, self._log_sum = output, log_sum

    def add(self, output: Tensor, log_sum: Tensor) -> None:
        total = torch.logaddexp(self._log_sum, log_sum)
        self.output = self.output * (self._log_sum - total).exp().unsqueeze(-1)
        self.output += output * (log_sum - total).exp().unsqueeze(-1)
        self._log_sum = total


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float, *, causal: bool) -> tuple[Tensor, Tensor]:
    """Attention of queries [B, H, T, K] to keys and values [B, H, N, K]: [B, H, T, K], and log-sum-exp [B, H, T]."""
    if q.device.type == "cpu":
        # scaled_dot_product_attention runs this; the public function drops the sums.
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)
    return attend_plainly(q, k, v, scale, causal=causal)


def attend_plainly(q: Tensor, k: Tensor, v: Tensor, scale: float, *, causal: bool) -> tuple[Tensor, Tensor]:
    """`attend` in plain torch, for any device, in parts whose scores take at most _SCORE_BYTES."""
    at_once = max(1, _SCORE_BYTES // (k.shape[:-1].numel() * k.itemsize))
    places = torch.arange(k.shape[2], device=k.device)
    outputs, log_sums = [], []
    for start in range(0, q.shape[2], at_once):
        scores = q[:, :, start : start + at_once] @ k.mT * scale
        if causal:
            own = torch.arange(start, start + scores.shape[2], device=k.device).unsqueeze(1)
            scores = scores.masked_fill(places > own, -torch.inf)
        log_sums.append(scores.logsumexp(-1))
        outputs.append(scores.softmax(-1) @ v)
    return torch.cat(outputs, dim=2), torch.cat(log_sums, dim=2)
