"""How long the steps of an instance last, by what was measured of it: for an engine that is emulated, and simulated.

A step lasts as long as its chunks of prompts, one after the other, and its decodes. What any step costs however little
it computes, it costs once. A prompt alone takes the time of its curve. One beside decodes adds to their steps what was
measured of such prompts, by a curve of its own; without that, its chunks take as long as alone. Where other prompts cut
its chunks short, further chunks cost what was measured of short ones.
"""

from collections.abc import Sequence
from typing import NamedTuple

from prfaas.capacity.builtin import DecodeStep, step_seconds
from prfaas.errors import InternalError
from prfaas.measure.curve import PrefillTimes


class StepChunk(NamedTuple):
    """A prompt's tokens of one step, behind those computed. `left_tokens` are those until the prompt's end, or until
    the place before it where a chunk ends in any case."""

    start_tokens: int
    tokens: int
    left_tokens: int
    is_first: bool


class StepTimes(NamedTuple):
    """The times of an instance. Only a measurement knows more than the first two; without it a step's parts take as
    long as each by itself."""

    prefill: PrefillTimes
    decode_steps: tuple[DecodeStep, ...]
    common_seconds: float = 0.0
    """What any step costs, such as reading the weights: it is in the time of each prefill and of each decode step."""
    cut_seconds: float = 0.0
    """What a further chunk of a prompt costs, however short it is, beside the step that it is in."""
    context_tokens: int = 0
    """Behind each sequence of the decode steps."""
    decode_token_seconds: float = 0.0
    """What each token of context more or less than that is to a sequence's step."""
    beside_decodes: PrefillTimes | None = None
    """What a prompt adds to steps that decode."""

    def decode_seconds(self, batch: int, context_tokens: int) -> float:
        """Return the seconds in which a step decodes a token of each of `batch` sequences, which have so many tokens
        together. The batch is one of those known."""
        if not batch:
            return 0.0
        seconds = step_seconds(self.decode_steps, batch)
        if seconds is None:
            raise InternalError(f"no decode step of {batch} sequences is known")
        return max(0.0, seconds + self.decode_token_seconds * (context_tokens - batch * self.context_tokens))

    def step_seconds(
        self, chunks: Sequence[StepChunk], batch: int, context_tokens: int, alone_tokens: int
    ) -> tuple[float, float]:
        """Return how long a step computes prompts, and how long it lasts. It decodes a token of `batch` sequences. A
        prompt alone has `alone_tokens` a step."""
        decode_seconds = self.decode_seconds(batch, context_tokens)
        if batch and self.beside_decodes is not None:
            added = self._added_seconds(self.beside_decodes, chunks)
            return added, added + decode_seconds
        shares = [_share(chunk, alone_tokens) for chunk in chunks]
        chunks_seconds = [
            self.prefill.chunk_seconds(one.start_tokens, one.tokens, is_first=one.is_first)
            + (1 - share) * self.cut_seconds
            for one, share in zip(chunks, shares, strict=True)
        ]
        alone = *chunks_seconds, decode_seconds
        shared = self.common_seconds * max(0.0, sum(shares) + bool(batch) - 1)
        seconds = max(*alone, sum(alone) - shared)
        return min(sum(chunks_seconds), seconds), seconds

    def _added_seconds(self, beside: PrefillTimes, chunks: Sequence[StepChunk]) -> float:
        """Return what chunks add to a step that decodes. A prompt was measured that had all of the step's tokens."""
        all_tokens = sum(chunk.tokens for chunk in chunks)
        return sum(
            beside.chunk_seconds(one.start_tokens, one.tokens, is_first=one.is_first)
            + (1 - _share(one, all_tokens)) * self.cut_seconds
            for one in chunks
        )


def _share(chunk: StepChunk, alone_tokens: int) -> float:
    """Return how much of a chunk of `alone_tokens` this one is. It is all of one unless other work of the step cuts it
    short. Then the prompt takes more chunks, each with what it costs however short it is."""
    if chunk.tokens >= min(chunk.left_tokens, alone_tokens):
        return 1.0
    return chunk.tokens / alone_tokens if chunk.left_tokens > alone_tokens else 0.0
