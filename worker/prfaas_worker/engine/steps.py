"""The seam between the step loop and what computes: a batch of sequences goes in, and tokens are drawn from the step.

`Runner` computes with a model, `EmulatedRunner` only takes the time. Neither's library is known here.
"""

from collections import abc
from typing import NamedTuple, Protocol

from prfaas.errors import PrfaasError
from prfaas.wire.engine import TokenLogprob
from prfaas.wire.kvevents import AttentionSpecKind
from prfaas.wire.stats import EmulationStats
from prfaas_worker.cache.blocks import Lease
from prfaas_worker.cache.transfer_frames import CachePlace
from prfaas_worker.cache_spec import LayerSpec, PagedMemory
from prfaas_worker.engine.sequences import Sequence


class ModelFacts(Protocol):
    """What the engine knows of its model; `Model` in models/base.py says what they mean."""

    vocab_size: int
    max_context: int
    fingerprint: str
    layers: tuple[LayerSpec, ...]
    attention_kind: AttentionSpecKind
    eos_token_ids: frozenset[int]


class StepWork(NamedTuple):
    """One step's sequences: each with its prompt tokens to compute, and those that decode one token."""

    chunks: abc.Sequence[tuple[Sequence, int]]
    decodes: abc.Sequence[Sequence]


class Drawn(NamedTuple):
    """The token and its requested log probability; or token -1 and the error that ends the request."""

    token: int
    logprob: TokenLogprob | None
    error: PrfaasError | None = None


class ComputedStep(Protocol):
    """A step's outputs, a row for each chunk and then for each decode, in the order of its work."""

    def draw(self, rows: abc.Sequence[int], sequences: abc.Sequence[Sequence], /) -> list[Drawn]:
        """Draw a token from each of these rows, for the sequence beside it, and advance the sequence's sampler."""
        ...


class StepRunner(Protocol):
    """Computes steps on one memory. All calls but those of `emulation` are from the engine's thread."""

    @property
    def model(self) -> ModelFacts: ...

    @property
    def memory(self) -> PagedMemory: ...

    def place(self, lease: Lease, /) -> CachePlace: ...

    def run(self, work: StepWork, /) -> ComputedStep:
        """Compute a step; send each finished layer of a prefill for another instance at once. Raises CapacityError if
        the device runs out of memory. Rows and states of the step's sequences are undefined then."""
        ...

    def rest(self) -> None:
        """Know that nothing is left to compute: the next step begins when its work comes."""
        ...

    def emulation(self) -> EmulationStats | None:
        """Return how well emulated steps kept their time; None where steps are computed."""
        ...
