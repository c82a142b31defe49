"""What the engine asks of a model, and the per-sequence cache that both share.

A hybrid model keeps two kinds of state for a sequence. An *attention* layer appends one row per token, so its rows can
leave for another instance while later tokens are still computed. A *linear* layer holds one state of fixed size that
stands for all tokens so far: it is right at exactly one length, cannot be rewound, and leaves whole.

Axis names belong to every tensor: where two axes have the same length, a swap would be silent. Nothing here knows a
particular architecture, HTTP or the wire.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple, Protocol

import torch

from prfaas.errors import InternalError

# Rows that a fresh attention cache has room for; from there capacity doubles, so appending costs O(1) copies a token.
_INITIAL_ROWS = 256


class TensorSpec(NamedTuple):
    """One tensor of a layer's cache.

    `axes` names every axis. Attention tensors grow along axes[0] == "token", which `shape` leaves out; linear tensors
    have a fixed `shape` with one entry per axis. `dtype` is torch's name, for example "float32".
    """

    name: str
    axes: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype as torch's object."""
        return getattr(torch, self.dtype)


class LayerSpec(NamedTuple):
    """The cache of one layer. An attention layer has exactly one tensor, with axes ("token", <row>)."""

    kind: Literal["attention", "linear"]
    tensors: tuple[TensorSpec, ...]


def _zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Zeros that may be written outside inference mode too, as transfers do, wherever they were allocated."""
    with torch.inference_mode(False):
        return torch.zeros(shape, dtype=dtype)


class AttentionCache:
    """Rows of one attention layer: a [capacity, width] buffer whose capacity doubles when a write needs more."""

    def __init__(self, spec: LayerSpec):
        (self.tensor_spec,) = spec.tensors
        self.width = self.tensor_spec.shape[0]
        self._buffer = _zeros((0, self.width), self.tensor_spec.torch_dtype)

    @property
    def capacity(self) -> int:
        """Rows that fit without another allocation."""
        return self._buffer.shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes allocated, which is at most twice what was reserved or written (and at least the initial room)."""
        return self._buffer.nbytes

    def reserve(self, tokens: int) -> None:
        """Make room for rows [0, tokens). Views that `rows` handed out before keep the old buffer and its values."""
        if tokens <= self.capacity:
            return
        capacity = max(tokens, 2 * self.capacity, _INITIAL_ROWS)
        grown = _zeros((capacity, self.width), self._buffer.dtype)
        grown[: self.capacity] = self._buffer
        self._buffer = grown

    def rows(self, start: int, end: int) -> torch.Tensor:
        """Contiguous, writable view [end - start, width] of rows that were written or reserved."""
        if not 0 <= start <= end <= self.capacity:
            raise InternalError(
                f"rows [{start}, {end}) asked of an attention cache that holds {self.capacity}: reserve first"
            )
        return self._buffer[start:end]

    def write(self, start: int, rows: torch.Tensor) -> None:
        """Copy rows [n, width] to tokens [start, start + n), growing as needed."""
        if rows.ndim != 2 or rows.shape[1] != self.width:
            raise InternalError(
                f"rows of shape {tuple(rows.shape)} written to an attention cache of width {self.width}"
            )
        end = start + rows.shape[0]
        self.reserve(end)
        self.rows(start, end).copy_(rows)


class LinearState:
    """The state of one linear layer, by tensor name; a fresh one is all zeros.

    `tensors` always holds contiguous tensors of the spec's shapes. The next prefill or decode of the sequence changes
    them in place: copy what must outlive that.
    """

    def __init__(self, spec: LayerSpec):
        self.spec = spec
        self.tensors = {t.name: _zeros(t.shape, t.torch_dtype) for t in spec.tensors}

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy the whole state from `tensors`, which have exactly the spec's names, shapes and dtypes."""
        wanted = {t.name: (t.shape, t.torch_dtype) for t in self.spec.tensors}
        given = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
        if wanted != given:
            raise InternalError(f"linear state loaded with {given}, its layer keeps {wanted}")
        for name, tensor in tensors.items():
            self.tensors[name].copy_(tensor)


class SequenceCache:
    """All layers' state of one sequence after `length` tokens.

    The model moves `length` on; whoever imports a cache from elsewhere writes every layer, then sets it.
    """

    def __init__(self, specs: Sequence[LayerSpec]):
        self.length = 0
        self.layers: list[AttentionCache | LinearState] = [
            AttentionCache(spec) if spec.kind == "attention" else LinearState(spec) for spec in specs
        ]

    @property
    def nbytes(self) -> int:
        """Bytes allocated for all layers."""
        return sum(layer.nbytes for layer in self.layers)

    def attention(self, layer: int) -> AttentionCache:
        """The rows of an attention layer."""
        cache = self.layers[layer]
        if not isinstance(cache, AttentionCache):
            raise InternalError(f"layer {layer} is linear, its rows were asked for")
        return cache

    def linear(self, layer: int) -> LinearState:
        """The state of a linear layer."""
        cache = self.layers[layer]
        if not isinstance(cache, LinearState):
            raise InternalError(f"layer {layer} is attention, its linear state was asked for")
        return cache


class Model(Protocol):
    """One loaded replica. Methods run on the calling thread and are not safe to call concurrently."""

    @property
    def vocab_size(self) -> int:
        """Width of the logits."""
        ...

    @property
    def max_context(self) -> int:
        """Most tokens that a sequence may have."""
        ...

    @property
    def hidden_size(self) -> int:
        """Width of the hidden state that `prefill` returns."""
        ...

    @property
    def fingerprint(self) -> str:
        """SHA-256, hex, over configuration and weights: caches may move only between equal fingerprints."""
        ...

    @property
    def layers(self) -> tuple[LayerSpec, ...]:
        """Shape of the cache, one entry a layer."""
        ...

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Tokens that end a generation."""
        ...

    def new_cache(self) -> SequenceCache:
        """An empty cache for one sequence."""
        ...

    def prefill(
        self, tokens: torch.Tensor, cache: SequenceCache, on_layer: Callable[[int], None] | None = None
    ) -> torch.Tensor:
        """Append tokens (int64 [T], T >= 1) at `cache.length`, which grows by T.

        `on_layer(i)` is called right after layer i is done with these tokens: its new rows stand in the cache, and its
        linear state is that after the last of them. A callback that raises leaves the cache unusable.

        Returns the last token's normed hidden state, fp32 [hidden_size], which `logits` takes.

        Raises:
            RequestError: the sequence would pass `max_context`, or a token is not in the vocabulary; the cache is
                unchanged.

        """
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits fp32 [..., vocab_size] of normed hidden states [..., hidden_size]."""
        ...

    def decode(self, tokens: torch.Tensor, caches: Sequence[SequenceCache]) -> torch.Tensor:
        """One step of B independent sequences: append tokens[b] (int64 [B]) to caches[b].

        Returns logits fp32 [B, vocab_size].

        Raises:
            RequestError: a sequence would pass `max_context`, or a token is not in the vocabulary; no cache is changed.

        """
        ...
