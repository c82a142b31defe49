"""The least work of a step, counted from the configuration: what a measured time is held against.

Operations of a prefill: two for every weight that a token is multiplied by (experts: those it is sent to), embedding
and head left out; causal attention as 2 H (K + V) for each pair of a token and one before it or itself, with the true
widths; the delta rule in its recurrent form, 6 K V a head and token (read, write, query). Chunked forms do more than
that, and get no credit for it.

Bytes of a decoding step: every weight outside the experts once (head included, embedding not), the experts that so many
tokens are expected to reach when each picks evenly, the rows of every sequence once, and every state read and written.
"""

from prfaas_worker.models.kimi_linear.config import KimiLinearConfig
from prfaas_worker.models.kimi_linear.shapes import expected_shapes

_BF16, _FP32 = 2, 4


def _weights(config: KimiLinearConfig) -> tuple[int, int]:
    """Weights outside experts, embedding and head; weights of one expert in one layer."""
    shared = 0
    for name, shape in expected_shapes(config).items():
        if ".experts." in name or name in ("model.embed_tokens.weight", "lm_head.weight"):
            continue
        count = 1
        for length in shape:
            count *= length
        shared += count
    return shared, 3 * config.expert_size * config.hidden_size


def _mixtures(config: KimiLinearConfig) -> int:
    return config.dense_layers.count(False)


def prefill_operations(config: KimiLinearConfig, tokens: int) -> float:
    """Operations of a prompt of so many tokens."""
    shared, expert = _weights(config)
    linear = 2 * tokens * (shared + _mixtures(config) * config.experts_per_token * expert)
    pairs = tokens * (tokens + 1) / 2
    attention = config.layer_kinds.count("attention") * config.num_heads
    attention *= 2 * (config.key_size + config.value_size) * pairs
    delta = config.layer_kinds.count("linear") * config.kda_heads * 6 * config.kda_head_size**2 * tokens
    return linear + attention + delta


def decode_bytes(config: KimiLinearConfig, batch: int, tokens: int) -> float:
    """Bytes that one step of `batch` sequences of so many tokens must move."""
    shared, expert = _weights(config)
    reached = config.num_experts * (1 - (1 - config.experts_per_token / config.num_experts) ** batch)
    weights = _BF16 * (shared + config.vocab_size * config.hidden_size + _mixtures(config) * reached * expert)
    rows = config.layer_kinds.count("attention") * (config.latent_size + config.shared_key_size) * _BF16 * tokens
    recurrent = config.kda_heads * config.kda_head_size**2 * _FP32
    conv = 3 * config.kda_size * (config.conv_kernel - 1) * _BF16
    return weights + batch * (rows + 2 * config.layer_kinds.count("linear") * (recurrent + conv))
