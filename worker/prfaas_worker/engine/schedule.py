"""What the engine computes in its next step: a pure function of who waits, who prefills and who decodes.

A step is at most `chunk_tokens` of prompt and one token for every decoding choice, so that a long prompt delays running
streams by one chunk, never by itself. Prompts are admitted and prefilled first come, first served: finishing one before
starting the next gives the lowest mean wait.
"""

from typing import NamedTuple


class Waiting(NamedTuple):
    """A request that holds nothing yet; it needs `choices` sequences."""

    handle: int
    choices: int


class Prefilling(NamedTuple):
    """An admitted prompt with `remaining_tokens` to compute."""

    handle: int
    remaining_tokens: int


class Facts(NamedTuple):
    """The engine's state, in order of arrival. `held` counts the sequences of all admitted requests."""

    waiting: tuple[Waiting, ...]
    prefilling: tuple[Prefilling, ...]
    decoding: tuple[int, ...]
    held: int


class Limits(NamedTuple):
    """Most sequences admitted at once, and prompt tokens a step."""

    max_running: int
    chunk_tokens: int


class Chunk(NamedTuple):
    """The next `tokens` of one prompt."""

    handle: int
    tokens: int


class Batch(NamedTuple):
    """One step: requests to admit, then chunks to prefill, then requests whose choices decode one token."""

    admit: tuple[int, ...]
    prefill: tuple[Chunk, ...]
    decode: tuple[int, ...]

    @property
    def empty(self) -> bool:
        """Nothing to do until something arrives."""
        return not (self.admit or self.prefill or self.decode)


def schedule(facts: Facts, limits: Limits) -> Batch:
    """Return the next step. A request admitted now is prefilled from the next step on."""
    return Batch(_admit(facts, limits), _chunks(facts.prefilling, limits.chunk_tokens), facts.decoding)


def _admit(facts: Facts, limits: Limits) -> tuple[int, ...]:
    """Admit in order of arrival while sequences are free: a wide request is not overtaken for ever by narrow ones."""
    admitted, held = [], facts.held
    for request in facts.waiting:
        held += request.choices
        if held > limits.max_running:
            break
        admitted.append(request.handle)
    return tuple(admitted)


def _chunks(prefilling: tuple[Prefilling, ...], budget_tokens: int) -> tuple[Chunk, ...]:
    chunks = []
    for prompt in prefilling:
        if budget_tokens == 0:
            break
        tokens = min(prompt.remaining_tokens, budget_tokens)
        chunks.append(Chunk(prompt.handle, tokens))
        budget_tokens -= tokens
    return tuple(chunks)
