"""Lists the families that the generic engine serves, and refuses other checkpoints by name before anything is loaded.

A family qualifies when all that its sequences leave behind is in the layer objects of transformers' cache. Each of
these is rows for every token, rows for a window of tokens, a state of fixed size, or a state beside rows. Its logits
must be what `scale_logits` makes of the head's output, which loading compares with the model's own. Nothing here
imports transformers: a refusal should not take seconds.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from prfaas.errors import ConfigError
from prfaas.wire.kvevents import AttentionSpecKind
from prfaas_worker.assets import read_object


def _soft_capped(logits: Tensor, config: Any) -> Tensor:
    cap = config.final_logit_softcapping
    return logits if cap is None else (logits / cap).tanh() * cap


class Family(NamedTuple):
    """Differences between families that their cache does not show. `scale_logits` takes the head's output and
    transformers' configuration of the text model."""

    attention_kind: AttentionSpecKind = "full_attention"
    scale_logits: Callable[[Tensor, Any], Tensor] = lambda logits, _config: logits


# By the model_type of config.json.
FAMILIES: Mapping[str, Family] = {
    "bailing_hybrid": Family(attention_kind="mla_attention"),
    "falcon_h1": Family(scale_logits=lambda logits, config: logits * config.lm_head_multiplier),
    "gemma3_text": Family(scale_logits=_soft_capped),
    "granitemoehybrid": Family(scale_logits=lambda logits, config: logits / config.logits_scaling),
    "kimi_linear": Family(attention_kind="mla_attention"),
    "lfm2": Family(),
    "mimo_v2_flash": Family(),
    "nemotron_h": Family(),
    "olmo_hybrid": Family(),
    "qwen3_5_moe_text": Family(),
    "qwen3_5_text": Family(),
    "qwen3_next": Family(),
}

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
