"""Runs the model for a step, and sends each finished layer of a prefill for another instance at once."""

import time
from collections import abc
from collections.abc import Callable
from typing import Final, NamedTuple

import torch

from prfaas.errors import CapacityError, InternalError
from prfaas.kvindex.blocks import BlockChain
from prfaas.wire.engine import Generate, Sampling
from prfaas_worker.cache.blocks import Lease
from prfaas_worker.cache.cache import HybridCache
from prfaas_worker.cache.memory import CacheMemory
from prfaas_worker.cache.staging import Staging
from prfaas_worker.cache.transfer_frames import CachePlace
from prfaas_worker.engine.remote import Export, export_of
from prfaas_worker.engine.sampling import sample
from prfaas_worker.engine.sequences import EngineRequest, Sequence
from prfaas_worker.engine.steps import Drawn, StepWork
from prfaas_worker.models.base import Batch, Chunk, Decodes, Model

_WARM_UP_TOKENS: Final = 64
_STRIDE: Final = 7919  # A prime: its multiples are spread over any vocabulary.


class StepResult(NamedTuple):
    """A step's hidden states fp32 [chunks + decodes, hidden_size] in the order of its work, and its seconds."""

    hidden: torch.Tensor
    seconds: float
    model: Model

    @torch.inference_mode()
    def draw(self, rows: abc.Sequence[int], sequences: abc.Sequence[Sequence]) -> list[Drawn]:
        # As many rows may still be others: a prompt with two choices beside a chunk that continues.
        hidden = self.hidden if rows == list(range(len(self.hidden))) else self.hidden[rows]
        return sample(self.model.logits(hidden), [sequence.ready_sampler for sequence in sequences])


class Runner:
    """Runs one model on its memory: a `StepRunner` that computes."""

    def __init__(self, model: Model, memory: CacheMemory, staging: Staging | None = None):
        self.model = model
        self.memory = memory
        self._staging = staging
        model.bind(memory)

    def place(self, lease: Lease) -> CachePlace:
        return CachePlace(self.memory, lease.slot, lease.pages, self._staging, lease.state_pages)

    @torch.inference_mode()
    def run(self, work: StepWork) -> StepResult:
        places = ((sequence, tokens, self.place(sequence.held)) for sequence, tokens in work.chunks)
        exports = [export for one in places if (export := export_of(*one))]
        started = time.monotonic()
        try:
            hidden = self.model.forward(self._batch(work), self._on_layer(exports))
            if self.model.device.type == "cuda":
                # Or the time below would be that of asking for the work. Copies of caches are on other streams.
                torch.cuda.current_stream(self.model.device).synchronize()
        except (torch.OutOfMemoryError, MemoryError) as error:
            raise CapacityError(f"no memory left to compute this step: {error}") from error
        except RuntimeError as error:
            # torch's allocator for CPUs has no error class of its own.
            if "can't allocate memory" not in str(error):
                raise
            raise CapacityError(f"no memory left to compute this step: {error}") from error
        seconds = time.monotonic() - started
        for sequence, _ in work.chunks:
            sequence.request.prefill_seconds += seconds
        return StepResult(hidden, seconds, self.model)

    def rest(self) -> None: ...

    def emulation(self) -> None: ...

    def _batch(self, work: StepWork) -> Batch:
        tokens = [token for sequence, count in work.chunks for token in sequence.next_tokens(count)]
        tokens += [sequence.token_ids[sequence.computed_tokens] for sequence in work.decodes]
        chunks = tuple(Chunk(one.held.slot, one.computed_tokens, count) for one, count in work.chunks)
        return Batch(self._tensor(tokens), chunks, self._decodes(work.decodes) if work.decodes else None)

    def _decodes(self, decoding: abc.Sequence[Sequence]) -> Decodes:
        lengths = [sequence.computed_tokens for sequence in decoding]
        slots = [sequence.held.slot for sequence in decoding]
        return Decodes(self._tensor(slots), self._tensor(lengths), max(lengths))

    def _tensor(self, numbers: list[int]) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.int64, device=self.model.device)

    def _on_layer(self, exports: abc.Sequence[Export]) -> Callable[[int], None] | None:
        if not exports:
            return None

        def on_layer(layer: int) -> None:
            mark = self._staging.mark() if self._staging else None
            for export in exports:
                export(layer, mark)

        return on_layer


def prefill_seconds(runner: Runner, cache: HybridCache, chunk_tokens: int, tokens: int) -> float:
    """Return the seconds of prefilling a prompt of no request in chunks, while nothing is served."""
    if (sequence := _open(runner, cache, tokens)) is None:
        raise InternalError(f"no memory for a prompt of {tokens} tokens while nothing is served")
    seconds = 0.0
    try:
        while left := sequence.remaining_tokens:
            seconds += _compute(runner, [(sequence, min(left, chunk_tokens))])
    finally:
        cache.close(sequence.held)
    return seconds


def step_seconds(runner: Runner, cache: HybridCache, tokens: int) -> float:
    """Return the seconds of a step with one chunk of a prompt of no request, while nothing is served."""
    return prefill_seconds(runner, cache, tokens, tokens)


def warm_up(runner: Runner, cache: HybridCache, max_tokens: int) -> None:
    """Run every kind of step once, while nothing is served. A kernel is compiled and tuned when it is first called,
    which may take a minute. Kinds for which the memory is too small cannot occur later either."""
    tokens, part = _WARM_UP_TOKENS, _WARM_UP_TOKENS // 3
    if max_tokens < tokens or (first := _open(runner, cache, tokens)) is None:
        return
    _compute(runner, [(first, part)])
    _compute(runner, [(first, part)])
    _compute(runner, [], [first])
    if (second := _open(runner, cache, tokens)) is not None:
        _compute(runner, [(second, part)])
        _compute(runner, [], [first, second])
        _compute(runner, [(second, part)], [first])
        cache.close(second.held)
    cache.close(first.held)


def _open(runner: Runner, cache: HybridCache, tokens: int) -> Sequence | None:
    """Return a sequence of no request, with memory; None if there is too little. Its tokens differ, as one token over
    and over would be one expert's work."""
    if (opened := cache.open((), tokens, 0)) is None:
        return None
    token_ids = [place * _STRIDE % runner.model.vocab_size for place in range(tokens)]
    message = Generate(0, "", token_ids, 1, 1, Sampling(0.0, 1.0, 0, 0), -1)
    return Sequence(EngineRequest(message), 0, message.token_ids, BlockChain(b""), lease=opened.lease)


def _compute(runner: Runner, chunks: abc.Sequence[tuple[Sequence, int]], decodes: abc.Sequence[Sequence] = ()) -> float:
    """Run a step and return its seconds."""
    seconds = runner.run(StepWork(chunks, decodes)).seconds
    for sequence, tokens in [*chunks, *((one, 1) for one in decodes)]:
        sequence.computed_tokens += tokens
    return seconds
