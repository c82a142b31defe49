"""Reads the public config.json of Kimi Linear into one frozen record, and refuses by name what we do not implement.

A field that is not listed here is refused too: it may change the computation and add no tensor.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, TypeVar, cast

from prfaas.errors import ConfigError
from prfaas_worker.assets import read_object
from prfaas_worker.models.config import ROPE_FIELDS, check_fields, check_plain_rope

LayerKind = Literal["attention", "linear"]

_Kind = TypeVar("_Kind")

MODEL_TYPE = "kimi_linear"

_WORDS = {int: "a whole number", float: "a number", bool: "true or false", list: "a list", dict: "an object"}

# Fields of which only these values are implemented; an absent one has the first. Most are of later models.
_NEUTRAL: Final[dict[str, tuple[Any, ...]]] = {
    "hidden_act": ("silu",),
    "q_lora_rank": (None,),
    "num_expert_group": (1,),
    "topk_group": (1,),
    "topk_method": ("noaux_tc", None),
    "moe_layer_freq": (1,),
    "mla_use_nope": (True,),
    "moe_router_activation_func": ("sigmoid",),
    "tie_word_embeddings": (False,),
    "attention_bias": (False, None),
    "num_nextn_predict_layers": (0, None),
    "attn_res_block_size": (None,),
    "mla_use_output_gate": (False, None),
    "latent_moe_use_norm": (False, None),
    "routed_expert_hidden_size": (None,),
    "activation_situ_beta": (None,),
    "activation_situ_linear_beta": (None,),
    "quantization_config": (None,),
}
_LINEAR_NEUTRAL: Final[dict[str, tuple[Any, ...]]] = {"gate_lower_bound": (None,), "use_full_rank_gate": (False, None)}

_LINEAR_FIELDS: Final = {"head_dim", "num_heads", "short_conv_kernel_size", "full_attn_layers", "kda_layers"}
_FIELDS: Final = {
    *("vocab_size", "hidden_size", "intermediate_size", "rms_norm_eps", "model_max_length", "eos_token_id"),
    *("num_hidden_layers", "linear_attn_config", "first_k_dense_replace", "mlp_layer_types"),
    *("num_attention_heads", "num_key_value_heads"),
    *("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
    *("num_experts", "num_experts_per_token", "num_shared_experts", "moe_intermediate_size", "moe_renormalize"),
    "routed_scaling_factor",
    # What transformers writes besides: `_check_repeated` compares it.
    *("layer_types", "linear_head_dim", "linear_num_heads", "linear_conv_kernel_dim", "qk_head_dim"),
    # Without effect here: no positions are rotated, all experts are one group, MLA has sizes of its own.
    *("rope_theta", *ROPE_FIELDS, "use_grouped_topk", "head_dim"),
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
        """Channels of q, k or v in a KDA layer, for all heads."""
        return self.kda_heads * self.kda_head_size

    @property
    def key_size(self) -> int:
        return self.nope_size + self.shared_key_size


def read_config(directory: Path) -> KimiLinearConfig:
    """Read `directory`/config.json. Raises ConfigError if it is unreadable, incomplete, or has an unsupported value."""
    path = directory / "config.json"
    raw = read_object(path)
    try:
        return parse_config(raw)
    except KeyError as error:
        raise ConfigError(f"{path}: the field {error.args[0]!r} of a Kimi Linear checkpoint is missing") from error
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def parse_config(raw: dict[str, Any]) -> KimiLinearConfig:
    """Turn config.json's document into sizes; raises KeyError for a missing field, ConfigError for a wrong one."""
    if (family := raw.get("model_type")) != MODEL_TYPE:
        raise ConfigError(f"model_type is {family!r}; the engine runs {MODEL_TYPE!r}")
    linear = _field(raw, "linear_attn_config", dict)
    check_fields(raw, _FIELDS, _NEUTRAL)
    check_fields(linear, _LINEAR_FIELDS, _LINEAR_NEUTRAL, "linear_attn_config.")
    check_plain_rope(raw)
    config = KimiLinearConfig(
        vocab_size=_size(raw, "vocab_size"),
        hidden_size=_size(raw, "hidden_size"),
        intermediate_size=_size(raw, "intermediate_size"),
        rms_norm_eps=_field(raw, "rms_norm_eps", float),
        max_context=_size(raw, "model_max_length"),
        eos_token_ids=_eos_token_ids(raw),
        layer_kinds=_layer_kinds(_size(raw, "num_hidden_layers"), linear),
        dense_layers=_dense_layers(raw),
        num_heads=_attention_heads(raw),
        latent_size=_size(raw, "kv_lora_rank"),
        nope_size=_size(raw, "qk_nope_head_dim"),
        shared_key_size=_size(raw, "qk_rope_head_dim"),
        value_size=_size(raw, "v_head_dim"),
        kda_heads=_size(linear, "num_heads"),
        kda_head_size=_size(linear, "head_dim"),
        conv_kernel=_size(linear, "short_conv_kernel_size"),
        num_experts=_size(raw, "num_experts"),
        experts_per_token=_size(raw, "num_experts_per_token"),
        shared_experts=_field(raw, "num_shared_experts", int),
        expert_size=_size(raw, "moe_intermediate_size"),
        renormalise=_field(raw, "moe_renormalize", bool),
        routed_scale=_field(raw, "routed_scaling_factor", float),
    )
    _check_repeated(raw, config)
    return config


def _check_repeated(raw: dict[str, Any], config: KimiLinearConfig) -> None:
    """Compare what transformers writes a second time with what it repeats."""
    repeated = {
        "layer_types": [f"{'full' if kind == 'attention' else kind}_attention" for kind in config.layer_kinds],
        "linear_head_dim": config.kda_head_size,
        "linear_num_heads": config.kda_heads,
        "linear_conv_kernel_dim": config.conv_kernel,
        "qk_head_dim": config.key_size,
    }
    for name, expected in repeated.items():
        if raw.get(name) not in (None, expected):
            raise ConfigError(f"{name} is {raw[name]!r}; by the other fields it is {expected!r}")


def _field(raw: dict[str, Any], name: str, kind: type[_Kind]) -> _Kind:
    """The field's value, of this type; an integer is a valid float, but a boolean is no number."""
    value = raw[name]
    accepted = (int, float) if kind is float else kind
    if not isinstance(value, accepted) or (isinstance(value, bool) and kind is not bool):
        raise ConfigError(f"{name} is {value!r}, a {type(value).__name__}; it must be {_WORDS[kind]}")
    return cast("_Kind", value)


def _size(raw: dict[str, Any], name: str) -> int:
    value = _field(raw, name, int)
    if value < 1:
        raise ConfigError(f"{name} is {value}; it must be at least 1")
    return value


def _numbers(raw: dict[str, Any], name: str) -> list[int]:
    values = _field(raw, name, list)
    if any(type(value) is not int for value in values):
        raise ConfigError(f"{name} is {values!r}; it must hold only whole numbers")
    return values


def _eos_token_ids(raw: dict[str, Any]) -> frozenset[int]:
    name = "eos_token_id"
    return frozenset(_numbers(raw, name) if isinstance(raw[name], list) else [_field(raw, name, int)])


def _attention_heads(raw: dict[str, Any]) -> int:
    """MLA's latent serves every head, so there are as many key heads as query heads."""
    heads = _size(raw, "num_attention_heads")
    if (key_heads := raw.get("num_key_value_heads", heads)) != heads:
        raise ConfigError(f"num_key_value_heads is {key_heads}, num_attention_heads {heads}: MLA needs them equal")
    return heads


def _layer_kinds(count: int, linear: dict[str, Any]) -> tuple[LayerKind, ...]:
    """Check that the two 1-based lists together name every layer once."""
    full_attention, kda = _numbers(linear, "full_attn_layers"), _numbers(linear, "kda_layers")
    if sorted(full_attention + kda) != list(range(1, count + 1)):
        raise ConfigError(
            f"linear_attn_config: full_attn_layers {full_attention} and kda_layers {kda} (1-based) must together name "
            f"each of the {count} layers once"
        )
    return tuple("attention" if layer in full_attention else "linear" for layer in range(1, count + 1))


def _dense_layers(raw: dict[str, Any]) -> tuple[bool, ...]:
    """True for layers with a plain MLP: `mlp_layer_types` or the first `first_k_dense_replace` layers."""
    count = raw["num_hidden_layers"]
    if raw.get("mlp_layer_types") is None:
        first_sparse = _field(raw, "first_k_dense_replace", int)
        return tuple(layer < first_sparse for layer in range(count))
    types = _field(raw, "mlp_layer_types", list)
    if len(types) != count or any(kind not in ("dense", "sparse") for kind in types):
        raise ConfigError(f"mlp_layer_types must hold {count} words 'dense' or 'sparse', it is {types}")
    return tuple(kind == "dense" for kind in types)
