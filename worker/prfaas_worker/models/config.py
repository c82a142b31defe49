"""Refuses fields of a config.json that nobody here knows: one may change the computation and add no tensor.

Weights do not show such a field, and a model that ignores it answers wrongly without an error. So each engine names the
fields that it reads, and those of which it implements some values only. Besides there are fields that change nothing
while a model answers: names of files and classes, numbers for training, token ids that others read. All else is refused
by its name. A field that is null is as one that is absent.
"""

from collections.abc import Collection, Mapping
from typing import Any, Final

from prfaas.errors import ConfigError

HARMLESS: Final = frozenset(
    {
        *("_commit_hash", "_name_or_path", "architectures", "auto_map", "cache_implementation", "dtype", "id2label"),
        *("is_encoder_decoder", "label2id", "model_type", "name_or_path", "num_labels", "problem_type", "torch_dtype"),
        *("transformers_version", "unsloth_fixed", "unsloth_version"),
        *("bos_token_id", "pad_token_id", "sep_token_id"),
        *("max_position_embeddings", "max_seq_len", "seq_length", "use_cache"),
        *("attention_dropout", "embedding_dropout", "hidden_dropout", "output_dropout", "gradient_checkpointing"),
        *("init_method", "initializer_range"),
        *("output_attentions", "output_hidden_states", "output_router_logits", "return_dict", "router_aux_loss_coef"),
        *("chunk_size_feed_forward", "pretraining_tp"),
    }
)
"""Fields that change no answer, whatever they hold."""

ROPE_FIELDS: Final = ("rope_parameters", "rope_scaling")
_PLAIN_ROPE: Final = {"rope_type": ("default",), "type": ("default",)}


def check_fields(
    raw: Mapping[str, Any], known: Collection[str], neutral: Mapping[str, tuple[Any, ...]], prefix: str = ""
) -> None:
    """Raise ConfigError for a field that is neither known, harmless nor null, or has a value other than its `neutral`
    ones, of which the first is to be shown. `prefix` is the object's path, such as "linear_attn_config."."""
    for name, value in raw.items():
        if name in neutral:
            if value not in neutral[name]:
                raise ConfigError(
                    f"{prefix}{name} is {value!r}; only {neutral[name][0]!r} is implemented: it changes the computation"
                )
        elif not (name in known or name in HARMLESS or value is None):
            raise ConfigError(
                f"{prefix}{name} is {value!r}, and this engine does not know the field. If it changes the computation, "
                "answers would be wrong: take another engine. If it does not, take it out of config.json"
            )


def check_plain_rope(raw: Mapping[str, Any]) -> None:
    """Raise ConfigError unless rotary embeddings are of the plain kind, without scaling."""
    for field in ROPE_FIELDS:
        rope = raw.get(field)
        if isinstance(rope, Mapping):
            check_fields(rope, {"rope_theta"}, _PLAIN_ROPE, f"{field}.")
        elif rope is not None:
            raise ConfigError(f"{field} is {rope!r}; it must be an object")
