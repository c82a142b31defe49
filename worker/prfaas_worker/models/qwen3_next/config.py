"""Refuses a checkpoint of Qwen3-Next that would be computed wrong, by the field of its config.json.

Nothing here imports transformers: a refusal should not take seconds.
"""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Final

from prfaas.errors import ConfigError
from prfaas_worker.assets import read_object
from prfaas_worker.models.config import ROPE_FIELDS, check_fields

# Fields that transformers does not know, and the values at which it computes what they ask for.
_NEUTRAL: Final = {
    "attn_output_gate": (True,),
    "use_sliding_window": (False,),
    "mamba_ssm_dtype": ("float32",),  # all is computed in it
}

# Fields that transformers reads, or that lead to tensors which it skips, though its class does not name them.
_READ: Final = frozenset(
    {
        *("full_attention_interval", "partial_rotary_factor", "rope_theta", *ROPE_FIELDS),
        *("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings", "num_mtp_layers", "num_nextn_predict_layers"),
        "max_window_layers",  # of a window that is not used
    }
)
_ROPE_READ: Final = frozenset(
    {
        *("rope_type", "type", "rope_theta", "partial_rotary_factor", "factor", "original_max_position_embeddings"),
        *("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
        *("low_freq_factor", "high_freq_factor"),
    }
)

# transformers recomputes the frequencies of these from the longest sequence that it has seen, so rows that were written
# before would not be those of the same prompt today, and a reused prefix would be wrong without a sign.
_LENGTH_DEPENDENT_ROPE: Final = {"dynamic", "longrope"}


def check_config(directory: Path) -> None:
    """Raise ConfigError if `directory`/config.json cannot be read, or asks for what is not served."""
    path = directory / "config.json"
    raw = read_object(path)
    if raw.get("quantization_config") is not None:
        raise ConfigError(
            f"{path}: quantization_config: quantized weights are not served; take the checkpoint in bfloat16"
        )
    if kinds := _rope_kinds(raw) & _LENGTH_DEPENDENT_ROPE:
        raise ConfigError(
            f"{path}: rope type {', '.join(sorted(kinds))}: positions would depend on the longest sequence served so "
            "far; set a type with fixed frequencies, for example yarn"
        )


def check_read(raw: Mapping[str, Any], unread: Collection[str]) -> None:
    """Raise ConfigError for a field of config.json that transformers has kept `unread`, unless it is known to change
    nothing, and for unknown parts of a rotary embedding."""
    check_fields({name: raw[name] for name in raw if name in unread}, _READ, _NEUTRAL)
    for field in ROPE_FIELDS:
        check_fields(raw.get(field) or {}, _ROPE_READ, {}, f"{field}.")


def _rope_kinds(raw: Mapping[str, Any]) -> set[str]:
    """Types of rotary embedding; old configurations name rope_scaling and type."""
    ropes = [raw.get(field) or {} for field in ROPE_FIELDS]
    return {entry[key] for entry in ropes for key in ("rope_type", "type") if isinstance(entry.get(key), str)}
