"""Defines the model interface of the engine, and the batch of a step.

A hybrid model keeps two kinds of cache for a sequence. *Rows* grow by one a token. They live in pages of the shared
pool. So they can leave for another instance, or serve another prompt, while later tokens are still computed. *State*
has a fixed size and covers all tokens so far. It is right at exactly one length, cannot be rewound, and leaves whole.
The state of a running sequence lives in a slot. A layer may keep either or both.

A step is one `Batch`: chunks of prompts and one token of every decoding sequence go through the model together. The
model finds their cache through the memory that it was bound to (see `prfaas_worker.cache.memory`).

Nothing here knows a particular architecture, HTTP or the wire.
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch

from prfaas.wire.kvevents import AttentionSpecKind
from prfaas_worker.cache.memory import CacheMemory
from prfaas_worker.cache_spec import LayerSpec


class Chunk(NamedTuple):
    """The next `tokens` of one prompt; the cache of its slot holds `start` tokens."""

    slot: int
    start: int
    tokens: int

    @property
    def end(self) -> int:
        return self.start + self.tokens


class Decodes(NamedTuple):
    """One token each of B sequences: their slots and cached lengths, int64 [B] on the device. `max_length` is the
    largest of `lengths`, known without a device read."""

    slots: torch.Tensor
    lengths: torch.Tensor
    max_length: int


class Batch(NamedTuple):
    """One step's input. `tokens`, int64 [N]: those of each chunk one after the other, then one for each decode."""

    tokens: torch.Tensor
    chunks: tuple[Chunk, ...] = ()
    decodes: Decodes | None = None

    @property
    def outputs(self) -> int:
        """Number of hidden states returned: the last of each chunk, and one for each decode."""
        return len(self.chunks) + (0 if self.decodes is None else self.decodes.slots.shape[0])


class Model(Protocol):
    """One loaded replica. Its methods are not safe to call concurrently."""

    vocab_size: int  # width of the logits
    max_context: int
    hidden_size: int  # width of the hidden states that `forward` returns
    fingerprint: str  # SHA-256, hex, over configuration and weights: caches move only between equal fingerprints
    layers: tuple[LayerSpec, ...]  # shape of the cache
    attention_kind: AttentionSpecKind  # of the rows, in the words of vLLM's cache events
    eos_token_ids: frozenset[int]  # tokens that end a generation

    @property
    def device(self) -> torch.device: ...

    @property
    def arithmetic(self) -> str:
        """The types and kernels that compute, in words for the log."""
        ...

    def bind(self, memory: CacheMemory) -> None:
        """Use this memory, made from `layers`, from now on. Called once, before the first `forward`."""

    def forward(self, batch: Batch, on_layer: Callable[[int], None] | None = None) -> torch.Tensor:
        """Run one step. Every sequence's pages cover its new tokens; its state slot is that after `start` tokens.

        `on_layer(i)` is called right after layer i is done with the batch: its new rows are in the pages, and its
        states are those after the last tokens. Returns normed hidden states, fp32 [batch.outputs, hidden_size], which
        `logits` takes.
        """
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits fp32 [..., vocab_size] of normed hidden states [..., hidden_size]."""
        ...
