"""The models that are measured: the published one, and one of the same make that fits any GPU."""

from dataclasses import dataclass, replace

from prfaas_worker.models.kimi_linear.config import KimiLinearConfig

# Published lists count from 1.
_FULL_ATTENTION = (4, 8, 12, 16, 20, 24, 27)

KIMI_LINEAR_48B = KimiLinearConfig(
    vocab_size=163840,
    hidden_size=2304,
    intermediate_size=9216,
    rms_norm_eps=1e-5,
    max_context=1 << 20,
    eos_token_ids=frozenset({163586}),
    layer_kinds=tuple("attention" if layer in _FULL_ATTENTION else "linear" for layer in range(1, 28)),
    dense_layers=tuple(layer == 0 for layer in range(27)),
    num_heads=32,
    latent_size=512,
    nope_size=128,
    shared_key_size=64,
    value_size=128,
    kda_heads=32,
    kda_head_size=128,
    conv_kernel=4,
    num_experts=256,
    experts_per_token=8,
    shared_experts=1,
    expert_size=1024,
    renormalise=True,
    routed_scale=2.446,
)

# The same heads and latents, so the same kernels, with fewer of everything else.
_SMALL = replace(
    KIMI_LINEAR_48B,
    hidden_size=1024,
    intermediate_size=4096,
    vocab_size=32768,
    layer_kinds=("linear", "linear", "linear", "attention") * 2,
    dense_layers=(True, *(False,) * 7),
    num_heads=16,
    kda_heads=16,
    num_experts=32,
    expert_size=512,
)


@dataclass(frozen=True)
class Size:
    """A model, and the lengths (in units of 1024 tokens) and batches that it is measured at."""

    name: str
    config: KimiLinearConfig
    is_published: bool
    prefill_lengths: tuple[int, ...]
    decode_lengths: tuple[int, ...]
    batches: tuple[int, ...]


SIZES = {
    "48b": Size("Kimi Linear 48B, random weights", KIMI_LINEAR_48B, True, (1, 8, 32, 128), (1, 32), (1, 16, 64)),
    "small": Size("a small Kimi Linear, random weights", _SMALL, False, (1, 8, 32), (1, 8), (1, 16)),
}
