"""What two instances must agree on before a cache crosses: a model's configuration, its weights, its types of numbers.

Weights are known by samples of their files, for a fine-tuning has the shapes of its model and a rollout may bring it to
one side first. Reading all of them again would take minutes. Where the files cannot be found, as with weights that were
streamed from an object store, the configuration alone speaks.
"""

import hashlib
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Protocol

from huggingface_hub import snapshot_download

log = logging.getLogger("vllm.prfaas")

SAMPLES: Final = 32
SAMPLE_BYTES: Final = 4096
_OWN_FIELDS: Final = ("_name_or_path", "name_or_path", "transformers_version")
"""What differs from place to place."""


class VllmModel(Protocol):
    """What is used of vLLM's ModelConfig."""

    model: str
    revision: str | None
    dtype: Any
    quantization: Any
    hf_config: Any


def fingerprint_of(model: VllmModel, cache_dtype: str, download_dir: str | None = None) -> str:
    """Return SHA-256, hex: instances of one model agree, wherever its files lie."""
    fields: Mapping[str, Any] = model.hf_config.to_dict()
    known = {
        "model": {name: value for name, value in fields.items() if name not in _OWN_FIELDS},
        "dtype": str(model.dtype),
        "quantization": model.quantization,
        "cache_dtype": cache_dtype,
        "weights": weights_digest(_directory(model, download_dir)),
    }
    return hashlib.sha256(json.dumps(known, sort_keys=True, default=str).encode()).hexdigest()


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
