"""What the engine does in its next step: a pure function of who waits, who runs, and what memory is left.

A step has a budget of tokens. Every decoding sequence takes one of it, and prompts share the rest. Half of that is for
the prompt that arrived first, so that each has its turn; half goes to whichever has least to compute, so that a short
prompt never waits for all of a long one. Among equals both are the first: finishing one before starting the next gives
the lowest mean wait. A long prompt delays running streams by one chunk, never by itself; how much prompt may stand
beside decodes is what an instance's role is about.

Memory is given by arrival, too. A prompt gets all of its pages when it is admitted, a decoding sequence one page at a
time. When the pages run out the sequence that arrived last gives all of its own back and waits again, in its old place:
so the one that arrived first always gets on, and with it in time everyone.
"""

from collections.abc import Hashable, Sequence
from typing import Final, Generic, NamedTuple, TypeVar

from prfaas.wire.engine import Role

Key = TypeVar("Key", bound=Hashable)
"""Whatever the caller knows a sequence by."""


class Waiting(NamedTuple, Generic[Key]):
    """A sequence that holds nothing. It comes with `slots` state slots to fill, and needs `pages` to be admitted."""

    key: Key
    slots: int
    pages: int


class Running(NamedTuple, Generic[Key]):
    """A sequence that holds memory and has `remaining_tokens` >= 1 to compute.

    One that `decodes` takes one token's place in the step, any other a chunk's, which may not go beyond
    `until_cut_tokens`. `short` says that its next token needs one more page, `held_pages` what would become free if it
    gave up, which one that is `pinned` may not: others read from its memory.
    """

    key: Key
    remaining_tokens: int
    until_cut_tokens: int
    held_pages: int
    short: bool
    decodes: bool
    pinned: bool = False


class Facts(NamedTuple, Generic[Key]):
    """The engine's state. Both lists are in order of arrival."""

    waiting: Sequence[Waiting[Key]]
    running: Sequence[Running[Key]]
    free_slots: int
    free_pages: int


class Budgets(NamedTuple):
    """Most tokens of a step, and most of them that may be prompt while something decodes."""

    step_tokens: int
    prompt_tokens_beside_decodes: int


BUDGETS: Final[dict[Role, Budgets]] = {
    "prefill": Budgets(2048, 2048),
    "mixed": Budgets(1024, 512),
    "decode": Budgets(1024, 128),
}
"""What a role means, as a step's length: a decode instance keeps its streams smooth, a prefill instance has none."""


class Chunk(NamedTuple, Generic[Key]):
    """The next `tokens` of one sequence's prompt."""

    key: Key
    tokens: int


class Batch(NamedTuple, Generic[Key]):
    """One step: sequences to preempt, then to admit in this order as far as memory goes, then what to compute."""

    preempt: tuple[Key, ...] = ()
    admit: tuple[Key, ...] = ()
    chunks: tuple[Chunk[Key], ...] = ()
    decodes: tuple[Key, ...] = ()

    @property
    def empty(self) -> bool:
        """Nothing to do until something arrives or ends."""
        return not (self.preempt or self.admit or self.chunks or self.decodes)


def schedule(facts: Facts[Key], budgets: Budgets) -> Batch[Key]:
    """Return the next step. What is admitted in it computes from the next one on."""
    decodes, preempted, free_pages = _decodes(facts)
    prompts = [sequence for sequence in facts.running if not sequence.decodes and sequence.key not in preempted]
    chunks = _chunks(prompts, len(decodes), budgets)
    # A page for each decode is left alone, or what is admitted now would be preempted in a moment.
    admit = () if preempted else _admit(facts, free_pages - len(decodes))
    return Batch(tuple(preempted), admit, chunks, tuple(decodes))


def _decodes(facts: Facts[Key]) -> tuple[list[Key], list[Key], int]:
    """Choose who decodes and who gives way for it; also the pages left then."""
    decodes: list[Key] = []
    preempted: list[Key] = []
    free_pages, last = facts.free_pages, len(facts.running)
    for place, sequence in enumerate(facts.running):
        if place >= last:
            break
        if not sequence.decodes:
            continue
        while sequence.short and free_pages == 0 and last > place + 1:
            last -= 1
            if not facts.running[last].pinned:
                preempted.append(facts.running[last].key)
                free_pages += facts.running[last].held_pages
        if sequence.short and free_pages == 0:
            continue  # what holds the pages is no sequence that computes: it ends without our help
        free_pages -= sequence.short
        decodes.append(sequence.key)
    return decodes, preempted, free_pages


def _chunks(prompts: list[Running[Key]], num_decodes: int, budgets: Budgets) -> tuple[Chunk[Key], ...]:
    left = budgets.step_tokens - num_decodes
    if num_decodes:
        left = min(left, budgets.prompt_tokens_beside_decodes)
    if left <= 0 or not prompts:
        return ()
    taken = dict.fromkeys((prompt.key for prompt in prompts), 0)
    half = -(-left // 2)
    for prompt, share in [(prompts[0], half), *((one, left) for one in sorted(prompts, key=_remaining))]:
        most = min(prompt.remaining_tokens, prompt.until_cut_tokens) - taken[prompt.key]
        tokens = min(most, share, left)
        taken[prompt.key] += tokens
        left -= tokens
    return tuple(Chunk(key, tokens) for key, tokens in taken.items() if tokens)


def _remaining(prompt: Running[Key]) -> int:
    return prompt.remaining_tokens


def _admit(facts: Facts[Key], free_pages: int) -> tuple[Key, ...]:
    """Admit in order of arrival: a large request is not overtaken for ever by small ones."""
    admitted, free_slots = [], facts.free_slots
    for sequence in facts.waiting:
        free_slots -= sequence.slots
        free_pages -= sequence.pages
        if free_slots < 0 or free_pages < 0:
            break
        admitted.append(sequence.key)
    return tuple(admitted)
