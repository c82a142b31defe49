"""Lists the families that the generic engine serves, and refuses other checkpoints by name before anything is loaded.

A family qualifies when all that its sequences leave behind is in the layer objects of transformers' cache. Each of
these is rows for every token, rows for a window of tokens, a state of fixed size, or a state beside rows. Its logits
must be what `scale_logits` makes of the head's output, which loading compares with the model's own. Nothing here
imports transformers: a refusal should not take seconds.
"""

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from torch import Tensor

from prfaas.errors import ConfigError
from prfaas.wire.kvevents import AttentionSpecKind
from prfaas_worker.assets import read_object
from prfaas_worker.models.config import ROPE_FIELDS, check_fields


def _soft_capped(logits: Tensor, config: Any) -> Tensor:
    cap = config.final_logit_softcapping
    return logits if cap is None else (logits / cap).tanh() * cap


class Family(NamedTuple):
    """Differences between families that their cache does not show. `scale_logits` takes the head's output and
    transformers' configuration of the text model. `neutral` lists fields that transformers does not know, and the
    values at which it computes what they ask for."""

    attention_kind: AttentionSpecKind = "full_attention"
    scale_logits: Callable[[Tensor, Any], Tensor] = lambda logits, _config: logits
    neutral: Mapping[str, tuple[Any, ...]] = MappingProxyType({})


_QWEN: Final = {
    "attn_output_gate": (True,),
    "use_sliding_window": (False,),
    "mamba_ssm_dtype": ("float32",),  # all is computed in it
}

# By the model_type of config.json.
FAMILIES: Mapping[str, Family] = {
    "bailing_hybrid": Family(
        attention_kind="mla_attention",
        neutral={
            "gated_attention_proj_granularity_type": ("head_wise",),
            "moe_router_enable_expert_bias": (True,),
            "moe_router_enable_routed_scaling": (True,),
            "moe_router_enable_shared_expert": (True,),
            "no_kda_lora": (True,),
            "rope_interleave": (True,),
            "score_function": ("sigmoid",),
            "use_bias": (False,),
            "use_qkv_bias": (False,),
            "use_rmsnorm": (True,),
        },
    ),
    "falcon_h1": Family(
        scale_logits=lambda logits, config: logits * config.lm_head_multiplier, neutral={"mamba_use_mlp": (True,)}
    ),
    "gemma3_text": Family(scale_logits=_soft_capped),
    "granitemoehybrid": Family(
        scale_logits=lambda logits, config: logits / config.logits_scaling,
        neutral={"normalization_function": ("rmsnorm",)},
    ),
    "kimi_linear": Family(attention_kind="mla_attention"),
    "lfm2": Family(neutral={"block_use_swiglu": (True,), "use_pos_enc": (True,)}),
    "mimo_v2_flash": Family(),
    "nemotron_h": Family(),
    "olmo_hybrid": Family(),
    "qwen3_5_moe_text": Family(neutral=_QWEN),
    "qwen3_5_text": Family(neutral=_QWEN),
    "qwen3_next": Family(neutral=_QWEN),
}

# Fields that transformers reads, or that lead to tensors which it checks or skips, though its classes do not name them.
_READ: Final = frozenset(
    {
        *("first_k_dense_replace", "linear_attn_config", "num_local_experts", "sliding_window_size"),
        *("_sliding_window_pattern", "sliding_window_pattern", "full_attention_interval", "head_dim"),
        *("partial_rotary_factor", "rope_local_base_freq", "rope_theta", *ROPE_FIELDS),
        *("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings", "num_mtp_layers", "num_nextn_predict_layers"),
        # Sizes that others repeat: wrong ones would be seen in the tensors' shapes.
        *("attention_head_dim", "block_dim", "conv_dim", "conv_dim_out", "intermediate_size", "linear_conv_kernel_dim"),
        *("linear_head_dim", "linear_num_heads", "mlp_expansion_factor", "num_heads", "qk_head_dim"),
        # Numbers for training, or for a window that is not used.
        *("block_mlp_init_scale", "block_norm_eps", "block_out_init_scale", "block_use_xavier_init"),
        *("conv_use_xavier_init", "max_window_layers"),
    }
)
_ROPE_READ: Final = frozenset(
    {
        *("rope_type", "type", "rope_theta", "partial_rotary_factor", "factor", "original_max_position_embeddings"),
        *("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
        *("low_freq_factor", "high_freq_factor"),
        *("mrope_interleaved", "mrope_section"),  # of images; text has equal positions in all sections
    }
)

_REFUSED = {
    "minimax": "its linear layers keep their state outside the layers of transformers' cache, so the state could "
    "neither be sent nor kept"
}

# transformers recomputes the frequencies of these from the longest sequence that it has seen, so rows that were written
# before would not be those of the same prompt today, and a reused prefix would be wrong without a sign.
_LENGTH_DEPENDENT_ROPE = {"dynamic", "longrope"}


def read_model_type(directory: Path) -> Any:
    """The model_type in `directory`/config.json. Raises ConfigError if the file cannot be read."""
    return read_object(directory / "config.json").get("model_type")


def read_family(directory: Path) -> Family:
    """The family of the checkpoint in `directory`. Raises ConfigError if it is unreadable or not served."""
    path = directory / "config.json"
    raw = read_object(path)
    try:
        return family_of(raw)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def family_of(raw: Mapping[str, Any]) -> Family:
    """The family of a config.json's document. Raises ConfigError if it is not served."""
    name = raw.get("model_type")
    if isinstance(name, str) and name in _REFUSED:
        served = ", ".join(sorted(FAMILIES))
        raise ConfigError(f"model_type {name!r} cannot be served: {_REFUSED[name]}; served are {served}")
    towers = [field for field in ("vision_config", "audio_config") if raw.get(field) is not None]
    if towers:
        raise ConfigError(
            f"{', '.join(towers)}: the checkpoint of {name!r} is for images or audio; only text models are served: "
            "take the family's text checkpoint"
        )
    family = FAMILIES.get(name) if isinstance(name, str) else None
    if family is None:
        raise ConfigError(f"model_type is {name!r}; served are {', '.join(sorted(FAMILIES))}")
    _refuse_variants(raw)
    return family


def check_read(raw: Mapping[str, Any], family: Family, unread: Collection[str]) -> None:
    """Raise ConfigError for a field of config.json that transformers has kept `unread`, unless it is known to change
    nothing, and for unknown parts of a rotary embedding."""
    check_fields({name: raw[name] for name in raw if name in unread}, _READ, family.neutral)
    for field in ROPE_FIELDS:
        given = raw.get(field) or {}
        by_layer = {name: entry for name, entry in given.items() if isinstance(entry, Mapping)}
        plain = {name: value for name, value in given.items() if name not in by_layer}
        for prefix, entry in ((f"{field}.", plain), *((f"{field}.{name}.", one) for name, one in by_layer.items())):
            check_fields(entry, _ROPE_READ, {}, prefix)


def _refuse_variants(raw: Mapping[str, Any]) -> None:
    if raw.get("quantization_config") is not None:
        raise ConfigError("quantization_config: quantized weights are not served; take the checkpoint in bfloat16")
    if raw.get("use_bidirectional_attention"):
        raise ConfigError("use_bidirectional_attention: a token would see later ones, so nothing of it could be cached")
    if kinds := _rope_kinds(raw) & _LENGTH_DEPENDENT_ROPE:
        raise ConfigError(
            f"rope type {', '.join(sorted(kinds))}: positions would depend on the longest sequence served so far; set "
            "a type with fixed frequencies, for example yarn"
        )


def _rope_kinds(raw: Mapping[str, Any]) -> set[str]:
    """Types of rotary embedding, of the whole model or by layer type; old configurations name rope_scaling and type."""
    kinds = set()
    for field in ("rope_parameters", "rope_scaling"):
        given = raw.get(field) or {}
        for entry in (given, *(value for value in given.values() if isinstance(value, dict))):
            kinds |= {entry[key] for key in ("rope_type", "type") if isinstance(entry.get(key), str)}
    return kinds
