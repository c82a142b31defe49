"""Decides an engine's next step: a pure function of waiting and running sequences and free memory.

The worker and the simulator ask it. This is continuous batching with chunked prefill. A step has a budget of tokens.
Every decoding sequence takes one token of it, and prompts share the rest. Half of the rest is for the prompt that
arrived first, so that each has its turn. The other half goes to the prompt with least to compute. So a short prompt
never waits for all of a long one. Among equals both are the first: finishing one before starting the next gives the
lowest mean wait. A long prompt delays running streams by one chunk, never by all of itself. An instance's role says how
much prompt may be computed beside decodes.

Other engines compute prompts in order of arrival. Where one of them is emulated or simulated, so does this.

Memory is given by arrival, too. A prompt gets all of its pages when it is admitted, a decoding sequence one page at a
time. When the pages run out, the sequence that arrived last gives back all its pages. It waits again, in its old place.
So the first one keeps its pages, and in time all end.

A sequence needs a slot, for its linear state, while it computes, and until its cache has left for another instance. If
what leaves took the place of what decodes, batches would be smaller by all that is on its way. So there are more slots
than sequences that decode at once. The cache of a whole prompt that comes from another instance lies in pages alone. It
takes its slot when it is computed, mostly with its first token, when fewer decode. It interrupts none.

A request for several choices is admitted as one sequence. Its further choices take slots as they come free, and at most
half of those that decode. So one request cannot stop the others.
"""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Final, Generic, NamedTuple, TypeVar

from prfaas.wire.engine import Role

STEP_TOKENS: Final = 1024
STEP_SIZES: Final = tuple(256 << doublings for doublings in range(8))
"""Tokens of the steps whose seconds are asked for, to 32,768."""
RUNNING: Final = 32
"""Sequences that an engine decodes at once, unless its options say otherwise."""
MOST_STEP_SECONDS: Final = 0.5
NEARLY: Final = 0.9

_Key = TypeVar("_Key", bound=Hashable)  # The caller's reference to a sequence.


class WaitingSequence(NamedTuple, Generic[_Key]):
    """A sequence without memory. It takes `pages` free pages to be admitted, and a slot, unless its whole cache `comes`
    from another instance. If `further`, its request has another choice with a slot."""

    key: _Key
    pages: int
    further: bool = False
    comes: bool = False


class RunningSequence(NamedTuple, Generic[_Key]):
    """A sequence that holds memory and has `remaining_tokens` >= 1 to compute.

    If it `decodes`, it takes one token of the step, otherwise a chunk, which may not go beyond `until_cut_tokens`.
    `short` says that its next token needs one more page. Preempting it would free `held_pages`; a `pinned` one may not
    be preempted, since others read from its memory: it has no answer. One that `continues` drew a token in the last
    step. One whose cache has come `lacks_slot`, until it is computed.
    """

    key: _Key
    remaining_tokens: int
    until_cut_tokens: int
    held_pages: int
    short: bool
    decodes: bool
    pinned: bool = False
    continues: bool = False
    lacks_slot: bool = False


class ScheduleFacts(NamedTuple, Generic[_Key]):
    """The engine's state. Sequences are in order of arrival. `waiting` is read once, and only as far as pages go: what
    one needs takes a look into the cache. Further choices may take `further_slots` more slots. At most `most_decodes`
    have a place for their answers in a step."""

    waiting: Iterable[WaitingSequence[_Key]]
    running: Sequence[RunningSequence[_Key]]
    free_slots: int
    free_pages: int
    further_slots: int
    most_decodes: int


class Budgets(NamedTuple):
    """Most tokens of a step, and most of them that may be prompt while something decodes. With `in_order` each prompt
    gets all that those before it leave, and what a step admits is computed in that step."""

    step_tokens: int
    prompt_tokens_beside_decodes: int
    in_order: bool = False


def step_tokens(seconds: Mapping[int, float]) -> int:
    """Return the tokens of a step for a machine on which a chunk of so many tokens takes so many seconds.

    Larger steps cost less a token, since each reads all weights. They also let others wait. So it is the smallest that
    is nearly as quick by the token as the quickest, but not less than STEP_TOKENS, and takes MOST_STEP_SECONDS at most.
    A prefill instance computes twice as many, so more than that has to have been measured, and to fit the memory.
    """
    if not seconds:
        return STEP_TOKENS
    least, rates = min(seconds), {tokens: tokens / taken for tokens, taken in seconds.items()}
    most = max(least, max(rates.values()) * MOST_STEP_SECONDS)
    while least < STEP_TOKENS and 2 * least <= most:
        least *= 2
    quick = {tokens: rate for tokens, rate in rates.items() if 2 * tokens in seconds and tokens <= most}
    nearly = NEARLY * max(quick.values(), default=0.0)
    return max(least, min((tokens for tokens, rate in quick.items() if rate >= nearly), default=least))


def role_budgets(tokens: int, *, in_order: bool = False) -> dict[Role, Budgets]:
    """Return step budgets by role: a decode instance keeps its streams smooth, a prefill instance has none. An engine
    that computes `in_order` knows no roles."""
    if in_order:
        alike = Budgets(tokens, tokens, in_order=True)
        return {"prefill": alike, "mixed": alike, "decode": alike}
    return {
        "prefill": Budgets(2 * tokens, 2 * tokens),
        "mixed": Budgets(tokens, -(-tokens // 2)),
        "decode": Budgets(tokens, -(-tokens // 8)),
    }


BUDGETS: Final = role_budgets(STEP_TOKENS)
"""Step budgets of a machine that was not measured."""


def slots_for(running: int) -> int:
    """Return how many slots there are where so many decode at once: as many again for prompts and caches that leave."""
    return 2 * running


def most_further_slots(running: int) -> int:
    """Return how many slots all further choices may have together where so many sequences decode at once."""
    return running // 2


class ScheduledChunk(NamedTuple, Generic[_Key]):
    """A prompt's tokens of one step."""

    key: _Key
    tokens: int


class Schedule(NamedTuple, Generic[_Key]):
    """One step: sequences to preempt, then to admit in this order as far as memory goes, then what to compute."""

    preempt: tuple[_Key, ...] = ()
    admit: tuple[_Key, ...] = ()
    chunks: tuple[ScheduledChunk[_Key], ...] = ()
    decodes: tuple[_Key, ...] = ()

    @property
    def empty(self) -> bool:
        """True if there is nothing to do until a message arrives or a transfer ends."""
        return not (self.preempt or self.admit or self.chunks or self.decodes)


def schedule(facts: ScheduleFacts[_Key], budgets: Budgets) -> Schedule[_Key]:
    """Return the next step. What is admitted in it computes from the next one on."""
    decodes, preempted, free = _choose_decodes(facts)
    prompts: list[RunningSequence[_Key]] = []
    places = facts.most_decodes - len(decodes)
    for sequence in facts.running:
        if sequence.decodes or sequence.key in preempted or (sequence.lacks_slot and min(free.slots, places) <= 0):
            continue
        free, places = free._replace(slots=free.slots - sequence.lacks_slot), places - sequence.lacks_slot
        prompts.append(sequence)
    chunks = _choose_chunks(prompts, len(decodes), facts.most_decodes, budgets)
    # One page for each decode stays free, or what is admitted now would be preempted in a moment.
    admit = () if preempted else _admit(facts, _Free(free.slots, free.pages - len(decodes)))
    return Schedule(tuple(preempted), admit, chunks, tuple(decodes))


class _Free(NamedTuple):
    """The memory that a step has left."""

    slots: int
    pages: int


def _choose_decodes(facts: ScheduleFacts[_Key]) -> tuple[list[_Key], list[_Key], _Free]:
    """Return the decoding sequences, those preempted for them, and the memory left then. Those that continue come
    first. One without a page or slot takes no place: it may wait for those that do not. Those that lack a slot give way
    first, for they have no answer that would be interrupted, and then the others, in each case the last."""
    decodes: list[_Key] = []
    preempted: list[_Key] = []
    free_slots, free_pages, last = facts.free_slots, facts.free_pages, len(facts.running)
    without_slot = [sequence for sequence in facts.running if sequence.lacks_slot]
    for place, sequence in sorted(enumerate(facts.running), key=lambda one: not one[1].continues):
        if len(decodes) == facts.most_decodes:
            break
        if place >= last or not sequence.decodes or sequence.key in preempted:
            continue
        if sequence.lacks_slot and free_slots <= 0:
            continue
        while sequence.short and free_pages == 0 and (without_slot or last > place + 1):
            if without_slot:
                victim = without_slot.pop()
            else:
                last -= 1
                victim = facts.running[last]
            if not victim.pinned and victim.key not in preempted and victim.key != sequence.key:
                preempted.append(victim.key)
                free_pages += victim.held_pages
        if sequence.short and free_pages == 0:
            continue  # the pages belong to a sequence that computes no more: it ends by itself
        free_pages -= sequence.short
        free_slots -= sequence.lacks_slot
        decodes.append(sequence.key)
    return [key for key in decodes if key not in preempted], preempted, _Free(free_slots, free_pages)


def _choose_chunks(
    prompts: list[RunningSequence[_Key]], num_decodes: int, most_decodes: int, budgets: Budgets
) -> tuple[ScheduledChunk[_Key], ...]:
    left = budgets.step_tokens - num_decodes
    if num_decodes:
        left = min(left, budgets.prompt_tokens_beside_decodes)
    if left <= 0 or not prompts:
        return ()
    taken = dict.fromkeys((prompt.key for prompt in prompts), 0)
    shares = [(one, left) for one in prompts]
    if not budgets.in_order:
        shares.sort(key=lambda share: share[0].remaining_tokens)
        shares.insert(0, (prompts[0], -(-left // 2)))
    for prompt, share in shares:
        most = min(prompt.remaining_tokens, prompt.until_cut_tokens) - taken[prompt.key]
        tokens = min(most, share, left)
        taken[prompt.key] += tokens
        left -= tokens
    for prompt in prompts:
        if taken[prompt.key] == prompt.remaining_tokens and not prompt.pinned:
            # Its last token draws one. Without a place for its answer it computes all but that.
            taken[prompt.key] -= num_decodes >= most_decodes
            num_decodes += 1
    return tuple(ScheduledChunk(key, tokens) for key, tokens in taken.items() if tokens)


def _admit(facts: ScheduleFacts[_Key], free: _Free) -> tuple[_Key, ...]:
    """Admit in order of arrival: a large request is not overtaken for ever by small ones. Others pass only further
    choices, while as many as may have slots do, and what needs a slot where there is none."""
    admitted: list[_Key] = []
    (free_slots, free_pages), further_slots = free, facts.further_slots
    for sequence in facts.waiting:
        if (sequence.further and further_slots <= 0) or (not sequence.comes and free_slots <= 0):
            continue
        further_slots -= sequence.further
        free_pages -= sequence.pages
        if free_pages < 0:
            break
        admitted.append(sequence.key)
        free_slots -= not sequence.comes
    return tuple(admitted)
