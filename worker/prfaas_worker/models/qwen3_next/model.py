"""Puts transformers' Qwen3-Next behind the engine's `Model` interface: on the CPU, in fp32, without gradients.

A checkpoint is loaded only from files: nothing is fetched and none of its code is run. Given wrong weights,
transformers warns and puts random numbers in their place. Here every difference is an error that lists them all.

Decodes go through the model together, as each brings one token. Chunks go one after the other. Transformers would batch
them by padding, and a linear layer would add pads to its state.
"""

import dataclasses
import hashlib
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
import xxhash
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

from prfaas.errors import ConfigError
from prfaas.wire.kvevents import AttentionSpecKind
from prfaas_worker.assets import read_object
from prfaas_worker.cache.memory import CacheMemory, bytes_of
from prfaas_worker.memory import check_weights_fit
from prfaas_worker.models.base import Batch, Chunk
from prfaas_worker.models.kimi_linear.checkpoint import weight_files
from prfaas_worker.models.qwen3_next.cache import PagedCache, layer_specs
from prfaas_worker.models.qwen3_next.config import check_read

_LISTED_DIFFERENCES = 50


class Qwen3Next:
    """A loaded checkpoint; `prfaas_worker.models.base.Model` documents each method."""

    attention_kind: AttentionSpecKind = "full_attention"

    def __init__(self, model: Qwen3NextForCausalLM, fingerprint: str):
        """Raises ConfigError if our memory cannot hold the model's cache."""
        self._decoder, self._head = model.model, model.lm_head
        self.fingerprint = fingerprint
        self.vocab_size, self.hidden_size = model.config.vocab_size, model.config.hidden_size
        self.max_context = model.config.max_position_embeddings
        self.eos_token_ids = _eos_token_ids(model)
        self.layers = layer_specs(model.config)

    @classmethod
    def load(cls, directory: Path) -> "Qwen3Next":
        model = load_causal_model(directory)
        return cls(model, fingerprint(directory, model))

    @property
    def device(self) -> torch.device:
        return self._head.weight.device

    @property
    def arithmetic(self) -> str:
        return "float32 products, layers of transformers"

    def bind(self, memory: CacheMemory) -> None:
        self._cache = PagedCache(memory)

    @torch.inference_mode()
    def forward(self, batch: Batch, on_layer: Callable[[int], None] | None = None) -> Tensor:
        """Run one step; a layer reports to `on_layer` after the last of the batch passed it. Chunks are last, so that a
        prompt's rows leave while it is computed."""
        hidden = torch.empty(batch.outputs, self.hidden_size, device=self.device)
        groups = list(_groups(batch))
        for group in groups:
            with self._notifying(on_layer if group is groups[-1] else None):
                hidden[group.outputs] = self._run(group.chunks, batch.tokens[group.tokens].view(len(group.chunks), -1))
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        return self._head(hidden)

    def _run(self, chunks: Sequence[Chunk], tokens: Tensor) -> Tensor:
        """Run new tokens [B, T] of B sequences; return the last hidden state of each."""
        arguments = self._cache.attach(chunks)
        output = self._decoder(input_ids=tokens, past_key_values=self._cache, use_cache=True, **arguments)
        self._cache.finish()
        return output.last_hidden_state[:, -1]

    @contextmanager
    def _notifying(self, on_layer: Callable[[int], None] | None) -> Iterator[None]:
        if on_layer is None:
            yield
            return
        handles = [
            layer.register_forward_hook(partial(self._after_layer, on_layer, index))
            for index, layer in enumerate(self._decoder.layers)
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _after_layer(self, on_layer: Callable[[int], None], index: int, *_hook: Any) -> None:
        """Report a layer; return None, since any other value would replace the layer's output."""
        self._cache.layers[index].finish()
        on_layer(index)


class _Group(NamedTuple):
    """Chunks that go through the model together, and their places among the batch's tokens and outputs."""

    chunks: Sequence[Chunk]
    tokens: slice | list[int]
    outputs: slice | list[int]


def _groups(batch: Batch) -> Iterator[_Group]:
    """Yield the decodes together, except empty sequences, whose layers have no state yet; then each chunk."""
    first = sum(chunk.tokens for chunk in batch.chunks)
    going: list[tuple[int, Chunk]] = []
    for i, decode in enumerate(_decodes(batch)):
        if decode.start:
            going.append((i, decode))
        else:
            yield _Group([decode], [first + i], [len(batch.chunks) + i])
    if going:
        numbers, decodes = zip(*going, strict=True)
        yield _Group(decodes, [first + i for i in numbers], [len(batch.chunks) + i for i in numbers])
    at = 0
    for i, chunk in enumerate(batch.chunks):
        yield _Group([chunk], slice(at, at + chunk.tokens), slice(i, i + 1))
        at += chunk.tokens


def _decodes(batch: Batch) -> list[Chunk]:
    if batch.decodes is None:
        return []
    slots, lengths = batch.decodes.slots.tolist(), batch.decodes.lengths.tolist()
    return [Chunk(slot, length, 1) for slot, length in zip(slots, lengths, strict=True)]


def _eos_token_ids(model: Any) -> frozenset[int]:
    """Tokens that end a generation, of config.json and generation_config.json together."""
    found: set[int] = set()
    for config in (model.config, model.generation_config):
        given = getattr(config, "eos_token_id", None)
        found |= set(given if isinstance(given, list) else [] if given is None else [given])
    return frozenset(found)


def load_causal_model(directory: Path) -> Qwen3NextForCausalLM:
    """Load the model in `directory`, in fp32, for inference. Raises ConfigError if a file cannot be read, or the
    weights do not fit config.json."""
    # Our errors replace theirs, and a progress bar does not belong in a log.
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    _hide_gpu_kernels()
    check_weights_fit(_weight_bytes(directory))
    architecture: Any = Qwen3NextForCausalLM  # by its types, `from_pretrained` returns a model alone
    try:
        config = Qwen3NextConfig.from_pretrained(directory, local_files_only=True)
        _check_fields(directory, config)
        model, report = architecture.from_pretrained(
            directory,
            config=config,
            dtype=torch.float32,
            attn_implementation="sdpa",
            local_files_only=True,
            use_safetensors=True,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    except ConfigError:
        raise
    except Exception as error:  # their tree has no root: a bad file or field may raise anything
        raise ConfigError(f"{directory}: transformers cannot load the checkpoint: {error}") from error
    if differences := _describe(report):
        listed = differences[:_LISTED_DIFFERENCES]
        more = [f"and {len(differences) - len(listed)} more"] if len(differences) > len(listed) else []
        raise ConfigError(f"{directory}: the weights do not fit config.json:\n  " + "\n  ".join(listed + more))
    return model.eval().requires_grad_(False)


def _check_fields(directory: Path, config: Qwen3NextConfig) -> None:
    """Raise ConfigError for a field that transformers does not know. It keeps such a field, and goes on without it."""
    aliases = config.attribute_map
    declared = {*(field.name for field in dataclasses.fields(config)), *aliases, *aliases.values()}
    unread = vars(config).keys() - declared
    path = directory / "config.json"
    try:
        check_read(read_object(path), unread)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def fingerprint(directory: Path, model: Qwen3NextForCausalLM) -> str:
    """SHA-256, hex, over this engine's name, config.json, and name, shape and XXH3-128 of every loaded tensor.

    It is taken from memory, so files are read once and their division does not matter. It finds accidents, not
    deliberate collisions.
    """
    digest = hashlib.sha256(b"transformers\n")
    digest.update(json.dumps(read_object(directory / "config.json"), sort_keys=True).encode())
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


def _hide_gpu_kernels() -> None:
    """Hide these packages from transformers: this engine runs on the CPU, where their kernels fail."""
    for package in ("causal_conv1d", "fla"):
        sys.modules[package] = None  # type: ignore[assignment]


def _weight_bytes(directory: Path) -> int:
    """Return the bytes of the weights in fp32, by the files' headers; transformers says what is wrong with no files."""
    total = 0
    for file in weight_files(directory) if any(directory.glob("*.safetensors")) else ():
        try:
            with safe_open(file, framework="pt") as opened:
                shapes = [opened.get_slice(name).get_shape() for name in opened.keys()]  # noqa: SIM118, no mapping
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"{file}: the weights cannot be read, fetch them again: {error}") from error
        total += sum(math.prod(shape) * torch.float32.itemsize for shape in shapes)
    return total
