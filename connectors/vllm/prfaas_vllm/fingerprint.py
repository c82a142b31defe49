"""What two instances must agree on before a cache crosses: a model's configuration, its weights, its types of numbers.

Only what changes a cache's bytes, or what they mean, counts. How long a prompt may be, how memory is shared out and how
requests are scheduled is each side's own matter. What is few words is told as it is, so that a refusal shows both
sides' values; the rest as digests.

Weights are known by samples of their files, for a fine-tuning has the shapes of its model and a rollout may bring it to
one side first. Reading all of them again would take minutes. Where the files cannot be found, as with weights that were
streamed from an object store, the configuration alone speaks.

Drafts that come from layers with a cache of their own (MTP, EAGLE, a draft model) are part of it, with their weights:
these layers' caches cross, too. How many tokens are drafted changes none of them. Drafts by n-grams have no cache.
"""

import hashlib
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

from huggingface_hub import snapshot_download

log = logging.getLogger("vllm.prfaas")

SAMPLES: Final = 32
SAMPLE_BYTES: Final = 4096
DIGEST_CHARS: Final = 16
_OWN_FIELDS: Final = frozenset({"_name_or_path", "name_or_path", "transformers_version", "max_model_len"})
"""What differs from place to place. vLLM notes its own option `max_model_len` in the configurations of some models."""
_SAME_CACHE_DTYPES: Final = {"fp8": "fp8_e4m3"}


class VllmModel(Protocol):
    """What is used of vLLM's ModelConfig."""

    model: str
    revision: str | None
    dtype: Any
    quantization: Any
    max_model_len: int
    hf_config: Any


class DraftLayers(NamedTuple):
    """Drafts by layers that have a cache of their own, in vLLM's words."""

    method: str
    model: VllmModel


def fingerprint_of(
    model: VllmModel, cache_dtype: str, download_dir: str | None = None, drafts: DraftLayers | None = None
) -> str:
    """Return a text on which instances of one model agree, wherever its files lie."""
    fields, dtype = _common_fields(model.hf_config.to_dict()), str(model.dtype).removeprefix("torch.")
    cache = dtype if cache_dtype == "auto" else _SAME_CACHE_DTYPES.get(cache_dtype, cache_dtype)
    positions = "of long contexts" if _has_long_positions(fields, model.max_model_len) else "plain"
    configuration = hashlib.sha256(json.dumps(fields, sort_keys=True, default=str).encode()).hexdigest()
    weights = weights_digest(_directory(model, download_dir)) or "unknown"
    return (
        f"dtype {dtype}, cache {cache}, quantization {model.quantization}, positions {positions}, "
        f"configuration {configuration[:DIGEST_CHARS]}, weights {weights[:DIGEST_CHARS]}, "
        f"draft layers {_draft_layers(drafts, download_dir)}"
    )


def _draft_layers(drafts: DraftLayers | None, download_dir: str | None) -> str:
    if drafts is None:
        return "none"
    method, model = drafts
    directory = _directory(model, download_dir)
    facts = [_kept_fields(directory), str(model.dtype), str(model.quantization), weights_digest(directory)]
    return f"{method} {hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:DIGEST_CHARS]}"


def _kept_fields(directory: Path | None) -> Any:
    """Return a draft's configuration as its files have it; None without any. Into the one that it has read vLLM writes
    what it needs of a draft, the longest prompt among it, and each version something else."""
    try:
        return _common_fields(json.loads((directory / "config.json").read_text())) if directory is not None else None
    except (OSError, ValueError, RecursionError):
        return None


def weights_digest(directory: Path | None) -> str:
    """Return a digest of sizes and samples of a checkpoint's files, in order of their names; empty without files.

    How the files are called does not count: their division into files does.
    """
    files = sorted(directory.glob("*.safetensors")) if directory is not None else []
    digest = hashlib.sha256()
    for path in files:
        size_bytes = path.stat().st_size
        digest.update(size_bytes.to_bytes(8, "big"))
        with path.open("rb") as file:
            for number in range(SAMPLES):
                file.seek(max(0, size_bytes - SAMPLE_BYTES) * number // (SAMPLES - 1))
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest() if files else ""


def _common_fields(value: Any) -> Any:
    """Return a configuration without what differs from place to place, at any depth."""
    if isinstance(value, Mapping):
        return {str(name): _common_fields(one) for name, one in value.items() if name not in _OWN_FIELDS}
    return [_common_fields(one) for one in value] if isinstance(value, (list, tuple)) else value


def _has_long_positions(fields: Any, max_model_len: int) -> bool:
    """Return whether vLLM takes LongRoPE's factors for long contexts: for all prompts of an instance whose longest may
    be longer than those of the model's first training, and for none of another instance."""
    if isinstance(fields, Mapping):
        trained = fields.get("original_max_position_embeddings")
        if fields.get("rope_type") == "longrope" and isinstance(trained, int) and max_model_len > trained:
            return True
        fields = list(fields.values())
    return isinstance(fields, list) and any(_has_long_positions(one, max_model_len) for one in fields)


def _directory(model: VllmModel, download_dir: str | None) -> Path | None:
    """Return where a loaded model's files are; None if that is not known."""
    if Path(model.model).is_dir():
        return Path(model.model)
    try:
        return Path(
            snapshot_download(model.model, revision=model.revision, cache_dir=download_dir, local_files_only=True)
        )
    except (OSError, ValueError) as error:  # no repository of that name is kept here
        log.warning("prfaas: the files of %s are not found, its weights are not compared: %s", model.model, error)
        return None
