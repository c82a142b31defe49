"""Caches of two models' shapes, without the models: what crosses the link is bytes."""

from prfaas_worker.cache_spec import LayerSpec, TensorSpec

Layers = tuple[LayerSpec, ...]


def _kimi_linear(kinds: str, *, latent: int, heads: int, head_size: int, dtype: str) -> Layers:
    """Layers in order, `a` for attention and `l` for linear, with the tensors that Kimi Linear keeps."""
    size = heads * head_size
    attention = LayerSpec(rows=(TensorSpec("latent", ("token", "latent_then_shared_key"), (latent,), dtype),))
    linear = LayerSpec(
        state=(
            TensorSpec("conv", ("q_k_v_channel", "tap"), (3 * size, 3), dtype),
            TensorSpec("recurrent", ("head", "key", "value"), (heads, head_size, head_size), "float32"),
        )
    )
    return tuple(attention if kind == "a" else linear for kind in kinds)


SHAPES: dict[str, Layers] = {
    # 8,064 bytes a token, 43.4 MB of state
    "48b": _kimi_linear("llla" * 6 + "lla", latent=576, heads=32, head_size=128, dtype="bfloat16"),
    # 256 bytes a token, 62 kB of state
    "tiny": _kimi_linear("llla", latent=64, heads=4, head_size=32, dtype="float32"),
}
