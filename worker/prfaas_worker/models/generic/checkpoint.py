"""Loads a checkpoint through transformers, from files alone: nothing is fetched and none of its code is run.

transformers answers wrong weights with a warning and random numbers in their place; here every difference is an error
that lists them all.
"""

import hashlib
import json
import re
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
import xxhash
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from prfaas.errors import ConfigError
from prfaas_worker.cache.memory import bytes_of
from prfaas_worker.models.generic.families import read_document

_LISTED_DIFFERENCES = 50
# A family may tell transformers to pass over such tensors in silence.
_TOWERS = re.compile(r"(^|\.)(visual|vision_tower|vision_model|audio_tower|multi_modal_projector)\.")


def load_causal_model(directory: Path) -> PreTrainedModel:
    """The language model in `directory`, in fp32, ready for inference.

    Raises:
        ConfigError: a file cannot be read, or the weights are not those of config.json.

    """
    # Our errors say what theirs would, and a progress bar is no line of a log.
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    _hide_kernels_without_a_gpu()
    _refuse_towers(directory)
    auto: Any = AutoModelForCausalLM
    try:
        config = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
        architecture = auto._model_mapping[type(config)]
        model, report = auto.from_pretrained(
            directory,
            config=config,
            dtype=torch.float32,
            attn_implementation="sdpa" if architecture._supports_sdpa else "eager",
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    except Exception as error:  # their tree has no root: a bad file or field may raise anything
        raise ConfigError(f"{directory}: transformers cannot load the checkpoint: {error}") from error
    if differences := _describe(report):
        listed = differences[:_LISTED_DIFFERENCES]
        more = [f"and {len(differences) - len(listed)} more"] if len(differences) > len(listed) else []
        raise ConfigError(f"{directory}: the weights do not fit config.json:\n  " + "\n  ".join(listed + more))
    return model.eval().requires_grad_(False)


def fingerprint(directory: Path, model: PreTrainedModel) -> str:
    """SHA-256, hex, over this engine's name, config.json, and name, shape and XXH3-128 of every loaded tensor.

    Taken from memory, so that the files are read once, and however they are cut. Our own engine for a family lays its
    cache out in another way, so its fingerprint of the same files must differ. As there, it finds accidents, and does
    not withstand somebody who makes two checkpoints that have one.
    """
    digest = hashlib.sha256(b"transformers\n")
    digest.update(json.dumps(read_document(directory), sort_keys=True).encode())
    for name, tensor in sorted(model.state_dict().items()):
        content = xxhash.xxh3_128_hexdigest(bytes_of(tensor.contiguous()))
        digest.update(f"\n{name} {list(tensor.shape)} {content}".encode())
    return digest.hexdigest()


def _describe(report: dict[str, Any]) -> list[str]:
    """One line per tensor that is missing, unknown or of another shape, sorted by name."""
    lines = dict.fromkeys(report["missing_keys"], "missing")
    lines |= dict.fromkeys(report["unexpected_keys"], "not in this architecture")
    for name, found, wanted in report["mismatched_keys"]:
        lines[name] = f"shape {list(found)}, the config asks for {list(wanted)}"
    return [f"{name}: {lines[name]}" for name in sorted(lines)]


def _hide_kernels_without_a_gpu() -> None:
    """Keep transformers from these packages, which it would use on a CPU too, where they fail."""
    if not torch.cuda.is_available():
        for package in ("causal_conv1d", "fla", "mamba_ssm"):
            sys.modules.setdefault(package, None)  # type: ignore[arg-type]


def _refuse_towers(directory: Path) -> None:
    """Read the names of all tensors, which costs no more than the files' headers."""
    names = set()
    for file in sorted(directory.glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt") as checkpoint:
                names |= {name for name in checkpoint.keys() if _TOWERS.search(name)}  # noqa: SIM118, not a mapping
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"{file}: the weights cannot be read, fetch them again: {error}") from error
    if names:
        listed = sorted(names)[:_LISTED_DIFFERENCES]
        raise ConfigError(
            f"{directory}: {len(names)} tensors are of a vision or audio tower; only text models are served: take the "
            "family's text checkpoint:\n  " + "\n  ".join(listed)
        )
