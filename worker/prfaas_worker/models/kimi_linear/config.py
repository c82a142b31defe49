"""The public config.json of Kimi Linear, read into one frozen record; what we cannot run is refused here by name."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from prfaas.errors import ConfigError

LayerKind = Literal["attention", "linear"]

MODEL_TYPE = "kimi_linear"

# Values that change the computation and that we implement in one form only.
_REQUIRED = {
    "hidden_act": "silu",
    "q_lora_rank": None,
    "num_expert_group": 1,
    "topk_group": 1,
    "moe_layer_freq": 1,
    "mla_use_nope": True,
    "moe_router_activation_func": "sigmoid",
    "tie_word_embeddings": False,
}


@dataclass(frozen=True, kw_only=True)
class KimiLinearConfig:
    """Sizes of a Kimi Linear checkpoint. `layer_kinds` and `dense_layers` have one entry per layer, from layer 0."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    rms_norm_eps: float
    max_context: int
    eos_token_ids: frozenset[int]
    layer_kinds: tuple[LayerKind, ...]
    dense_layers: tuple[bool, ...]
    # MLA
    num_heads: int
    latent_size: int
    nope_size: int
    shared_key_size: int
    value_size: int
    # KDA
    kda_heads: int
    kda_head_size: int
    conv_kernel: int
    # Mixture of experts
    num_experts: int
    experts_per_token: int
    shared_experts: int
    expert_size: int
    renormalise: bool
    routed_scale: float

    @property
    def kda_size(self) -> int:
        """Channels of q, k or v in a KDA layer, all heads together."""
        return self.kda_heads * self.kda_head_size

    @property
    def key_size(self) -> int:
        """Width of an MLA head's query and key."""
        return self.nope_size + self.shared_key_size


def read_config(directory: Path) -> KimiLinearConfig:
    """Read `directory`/config.json.

    Raises:
        ConfigError: the file is unreadable, a field is missing or has a value that we do not implement.

    """
    path = directory / "config.json"
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        return parse_config(raw)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}: is not JSON: {error}") from error
    except KeyError as error:
        raise ConfigError(f"{path}: the field {error.args[0]!r} of a Kimi Linear checkpoint is missing") from error
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def parse_config(raw: Any) -> KimiLinearConfig:
    """Turn the document of config.json into sizes; a missing field is a KeyError, a wrong one a ConfigError."""
    if not isinstance(raw, dict):
        raise ConfigError(f"holds a {type(raw).__name__}, not an object with a checkpoint's fields")
    if (family := raw.get("model_type")) != MODEL_TYPE:
        raise ConfigError(f"model_type is {family!r}; the engine runs {MODEL_TYPE!r}")
    for field, wanted in _REQUIRED.items():
        if (given := raw.get(field, wanted)) != wanted:
            raise ConfigError(f"{field} is {given!r}; only {wanted!r} is implemented")
    linear = raw["linear_attn_config"]
    eos = raw["eos_token_id"]
    return KimiLinearConfig(
        vocab_size=raw["vocab_size"],
        hidden_size=raw["hidden_size"],
        intermediate_size=raw["intermediate_size"],
        rms_norm_eps=raw["rms_norm_eps"],
        max_context=raw["model_max_length"],
        eos_token_ids=frozenset(eos if isinstance(eos, list) else [eos]),
        layer_kinds=_layer_kinds(raw["num_hidden_layers"], linear["full_attn_layers"], linear["kda_layers"]),
        dense_layers=_dense_layers(raw),
        num_heads=_attention_heads(raw),
        latent_size=raw["kv_lora_rank"],
        nope_size=raw["qk_nope_head_dim"],
        shared_key_size=raw["qk_rope_head_dim"],
        value_size=raw["v_head_dim"],
        kda_heads=linear["num_heads"],
        kda_head_size=linear["head_dim"],
        conv_kernel=linear["short_conv_kernel_size"],
        num_experts=raw["num_experts"],
        experts_per_token=raw["num_experts_per_token"],
        shared_experts=raw["num_shared_experts"],
        expert_size=raw["moe_intermediate_size"],
        renormalise=raw["moe_renormalize"],
        routed_scale=raw["routed_scaling_factor"],
    )


def _attention_heads(raw: dict[str, Any]) -> int:
    """MLA's latent serves every head, so there are as many key heads as query heads."""
    heads = raw["num_attention_heads"]
    if (key_heads := raw.get("num_key_value_heads", heads)) != heads:
        raise ConfigError(f"num_key_value_heads is {key_heads}, num_attention_heads {heads}: MLA needs them equal")
    return heads


def _layer_kinds(count: int, full_attention: list[int], kda: list[int]) -> tuple[LayerKind, ...]:
    """The two lists are 1-based and together name every layer once."""
    if sorted(full_attention + kda) != list(range(1, count + 1)):
        raise ConfigError(
            f"linear_attn_config: full_attn_layers {full_attention} and kda_layers {kda} (1-based) must together name "
            f"each of the {count} layers once"
        )
    return tuple("attention" if layer in full_attention else "linear" for layer in range(1, count + 1))


def _dense_layers(raw: dict[str, Any]) -> tuple[bool, ...]:
    """Which layers have a plain MLP: `mlp_layer_types` names them, or the first `first_k_dense_replace` are."""
    count = raw["num_hidden_layers"]
    types = raw.get("mlp_layer_types")
    if types is None:
        return tuple(layer < raw["first_k_dense_replace"] for layer in range(count))
    if len(types) != count or not set(types) <= {"dense", "sparse"}:
        raise ConfigError(f"mlp_layer_types must hold {count} words 'dense' or 'sparse', it is {types}")
    return tuple(kind == "dense" for kind in types)
