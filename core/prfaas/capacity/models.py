"""Cache sizes and weights of published models, from their configurations and model cards.

    S_kv(l) = state_bytes + token_bytes * l

    token_bytes   attention layers * elements of a token in one layer * 2 bytes (bf16)
    state_bytes   linear layers * (recurrent elements * 4 bytes (fp32) + convolution's last inputs * 2 bytes (bf16))

MLA keeps a latent and a shared key of each token, other attention a key and a value for each head. A linear layer keeps
a matrix for each head, and the last inputs of its convolution, one fewer than its kernel has. This is what vLLM keeps
by default. A cache in another precision has other sizes, and so have speculative layers, which are not counted here.

A name does not say a precision. So weights are those that the maker publishes under the plain name: a checkpoint in
fp8, mostly under a name of its own, has half of bf16. A plan's `weightsGb` goes before.
"""

from typing import Final, NamedTuple

ATTENTION_BYTES: Final = 2
RECURRENT_BYTES: Final = 4
CONVOLUTION_BYTES: Final = 2
KERNEL: Final = 4
"""Tokens that a convolution reads."""


class ModelCache(NamedTuple):
    attention_layers: int
    token_elements: int
    """Of one token in one attention layer."""
    linear_layers: int
    recurrent_elements: int
    """Of one linear layer."""
    convolution_elements: int
    """Likewise: the inputs that the convolution still needs."""
    key_value_heads: int
    """Among which ranks divide the rows of attention; 1 for MLA."""

    @property
    def token_bytes(self) -> int:
        return self.attention_layers * self.token_elements * ATTENTION_BYTES

    @property
    def state_bytes(self) -> int:
        state = self.recurrent_elements * RECURRENT_BYTES + self.convolution_elements * CONVOLUTION_BYTES
        return self.linear_layers * state

    def row_copies(self, ranks: int) -> int:
        """Return how often ranks of tensor parallelism hold each row: those without a head of their own copy one."""
        return max(1, ranks // self.key_value_heads)


def _kda(mla_layers: int, kda_layers: int, heads: int) -> ModelCache:
    """Kimi's: MLA with a latent of 512 and a key of 64, and KDA heads of 128."""
    return ModelCache(mla_layers, 512 + 64, kda_layers, heads * 128 * 128, (KERNEL - 1) * 3 * heads * 128, 1)


def _gdn(attention_layers: int, linear_layers: int, value_heads: int, kv_heads: int = 2) -> ModelCache:
    """Qwen's: key-value heads of 256, and Gated DeltaNet with 16 key heads and value heads of 128."""
    inputs, recurrent = (2 * 16 + value_heads) * 128, value_heads * 128 * 128
    return ModelCache(attention_layers, 2 * kv_heads * 256, linear_layers, recurrent, (KERNEL - 1) * inputs, kv_heads)


MODEL_CACHES: Final = {
    "kimi-k3": _kda(24, 69, 96),
    "kimi-linear-48b": _kda(7, 20, 32),
    "qwen3.5-397b": _gdn(15, 45, 64),
    "qwen3.5-122b": _gdn(12, 36, 64),
    "qwen3.5-35b": _gdn(10, 30, 32),
    "qwen3.5-27b": _gdn(16, 48, 48, kv_heads=4),
    "qwen3-next-80b": _gdn(12, 36, 32),
}
MODEL_WEIGHTS_BYTES: Final = {
    # Experts in MXFP4. AMD Infera's recipe says about 1.5 TB; aiconfigurator-core 0.12.0 counts 1,556 GB on 8 x B300.
    "kimi-k3": 1.56e12,
    # In bf16, 2 bytes for each of the parameters that the name tells. The same tool counts Qwen3.5 within 2 % of that.
    "kimi-linear-48b": 2 * 48e9,
    "qwen3.5-397b": 2 * 397e9,
    "qwen3.5-122b": 2 * 122e9,
    "qwen3.5-35b": 2 * 35e9,
    "qwen3.5-27b": 2 * 27e9,
    "qwen3-next-80b": 2 * 80e9,
}
"""Of all experts, as published under this name."""
