"""The course of a measurement: which prompts are sent, in which order, how often, and when to stop.

Prompts are random tokens, new each time, so that no cache of prefixes helps. A length is tried twice first: the first
time compiles and allocates, the second is measured. Then all lengths are repeated in random order, so that a
disturbance meets all alike. Decode steps are measured with more and more streams at once, until the server no longer
runs them together. Then prompts come beside streams. The server and the source of chance are arguments.
"""

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from typing import Final, NamedTuple, Protocol

from prfaas.capacity.builtin import DecodeStep
from prfaas.capacity.profile import Curve, Sample, prefill_seconds
from prfaas.capacity.workload import Randomness
from prfaas.errors import CapacityError, ConfigError, PeerError, RequestError
from prfaas.measure.answers import CacheBytes, ServedCard, StreamedAnswer
from prfaas.measure.beside import BEGUN_TOKENS, added_seconds
from prfaas.measure.fit import (
    FEW_TOKENS,
    AddedTime,
    LengthTimes,
    Measurement,
    agreeing_step,
    check_sound,
    fitted,
    step_seconds,
    times_of,
)

SHORTEST_TOKENS: Final = 256
FACTOR: Final = 4
FEW_LENGTHS: Final = 5
ANSWER_TOKENS: Final = 64
"""Steps that streams run together, about."""
MAX_BATCH: Final = 128
_DECODE_PROMPT_TOKENS: Final = 1024
_REPEATS: Final = 3
_MOST_REPEATS: Final = 12
_REPEATED_SECONDS: Final = 1.0
"""Quick lengths are repeated for about so long, more often than slow ones: a millisecond is more of them."""
_MORE_ROUNDS: Final = 4
_LONGEST_SECONDS: Final = 45.0
"""No prompt is sent that is expected to take longer: it comes six times at least."""
_BESIDE_STREAMS: Final = 4
_BESIDE_PROMPT_TOKENS: Final = 64
_LONGEST_BESIDE_SECONDS: Final = 10.0
"""No prompt is sent beside streams that takes longer alone."""
# The first is in every vocabulary of today's models, and free of what they use for control. The second has all bytes.
_VOCABULARIES: Final = (range(1000, 32_000), range(256))


class MeasuredServer(Protocol):
    """The server, as one client sees it."""

    def ask(self, prompts: Sequence[list[int]], answer_tokens: int) -> list[StreamedAnswer]:
        """Send all prompts at once and wait for their answers, each of exactly so many tokens."""
        ...

    def ask_beside(
        self, streams: Sequence[list[int]], answer_tokens: int, prompt: list[int]
    ) -> tuple[list[StreamedAnswer], StreamedAnswer]:
        """Send the prompts of `streams` at once, and `prompt`, for one token, when each has had BEGUN_TOKENS of its
        `answer_tokens`. Wait for all answers."""
        ...

    def others(self) -> int | None:
        """Return how many requests it has now, which are not ours; None if it does not say."""
        ...


class Reach(NamedTuple):
    """How long prompts may be: the model's context with room for an answer, and what the caller allows."""

    context_tokens: int
    max_tokens: int


def reach_of(card: ServedCard, max_tokens: int | None) -> Reach:
    """Return how far to measure; raises ConfigError where nothing says it, or there is no room for two lengths."""
    if card.max_model_len is None and max_tokens is None:
        raise ConfigError("the server does not say how long its prompts may be: give --max-tokens")
    context = card.max_model_len or (max_tokens or 0) + ANSWER_TOKENS
    longest = min(context - 1, max_tokens or context)
    if longest < 2 * SHORTEST_TOKENS:
        raise ConfigError(
            f"prompts of at most {longest} tokens make no curve, with a context of {context}: "
            f"it takes {2 * SHORTEST_TOKENS}; raise --max-tokens, or the server's context"
        )
    return Reach(context, longest)


def lengths_up_to(longest_tokens: int) -> tuple[int, ...]:
    """Return the lengths to measure: each FACTOR times the one before, or fewer times where these would be few."""
    factor = FACTOR if longest_tokens >= SHORTEST_TOKENS * FACTOR ** (FEW_LENGTHS - 1) else 2
    count = int(math.log(longest_tokens / SHORTEST_TOKENS, factor) + 1e-9)
    lengths = [SHORTEST_TOKENS * factor**power for power in range(count + 1)]
    return (*lengths, longest_tokens) if longest_tokens >= 1.5 * lengths[-1] else tuple(lengths)


def repeats_of(seconds: float) -> int:
    """Return how often a length is repeated that takes so long."""
    return min(_MOST_REPEATS, max(_REPEATS, round(_REPEATED_SECONDS / seconds)))


def answer_tokens_for(batch: int, prompt_seconds: float, step: float) -> int:
    """Return how long answers must be, for the last of a batch's prompts to be computed while the first is answered."""
    return ANSWER_TOKENS + math.ceil(1.5 * (batch - 1) * prompt_seconds / step)


class Session:
    """One measurement of one server. `say` tells the person who waits, `rng` is the chance. Without `lengths`, in
    tokens, those are measured that lie evenly in the server's reach."""

    def __init__(
        self,
        server: MeasuredServer,
        reach: Reach,
        rng: Randomness,
        say: Callable[[str], None],
        lengths: Sequence[int] = (),
    ) -> None:
        self._server = server
        self._reach = reach
        self._rng = rng
        self._say = say
        self._lengths = lengths or lengths_up_to(reach.max_tokens)
        self._vocabulary = _VOCABULARIES[0]
        self._others: list[int] = []
        self._notes: list[str] = []

    def measure(self, card: ServedCard, source: str, cache: CacheBytes) -> Measurement:
        """Measure. Raises CapacityError where the server is too busy for it, PeerError where it fails."""
        self._choose_vocabulary()
        samples = self._prefills(cache)
        least = statistics.median(self._lone(FEW_TOKENS).seconds for _ in range(_MOST_REPEATS))
        profile = fitted(samples, cache)
        lengths = times_of(samples, profile)
        notes = check_sound(lengths, self._others)
        if not self._others:
            notes.append("the server does not say whether it has requests of others; see to it that it has none")
        looks = len(self._others)
        prompt_tokens = min(_DECODE_PROMPT_TOKENS, self._reach.max_tokens // 2)
        steps = self._decodes(prompt_tokens, prefill_seconds(profile, prompt_tokens))
        token_seconds = self._context_cost(prompt_tokens, profile.max_tokens, steps.get(1))
        beside = self._beside(lengths, steps)
        try:
            notes += check_sound((), self._others[looks:])
        except CapacityError as error:
            notes.append(f"decode steps were left out: {error}")
            steps, beside = {}, ()
        return Measurement(
            model=card.id,
            source=source,
            profile=profile,
            cache_source=cache.source,
            lengths=lengths,
            decode_context_tokens=prompt_tokens + ANSWER_TOKENS // 2,
            decode_steps=tuple(DecodeStep(batch=batch, seconds=seconds) for batch, seconds in steps.items()),
            decode_token_seconds=token_seconds,
            least_prompt_seconds=least,
            beside_decodes=beside,
            in_order=not card.is_ours,
            notes=(*notes, *self._notes),
        )

    def _choose_vocabulary(self) -> None:
        """Take the smaller vocabulary where the server refuses the larger; raises RequestError if it refuses both."""
        for self._vocabulary in _VOCABULARIES:
            is_last = self._vocabulary is _VOCABULARIES[-1]
            with nullcontext() if is_last else suppress(RequestError):
                self._server.ask([[self._vocabulary[-1]] * 8], 1)
                return

    def _prefills(self, cache: CacheBytes) -> list[Sample]:
        samples: list[Sample] = []
        for tokens in self._lengths:
            expected = prefill_seconds(Curve.fitted(samples).profile(0, 0), tokens)
            if expected > _LONGEST_SECONDS and len(samples) > 2:
                self._notes.append(
                    f"prompts of {tokens:,} tokens were left out: each would take about {expected:.0f} s; "
                    f"beyond {2 * samples[-1].tokens:,} tokens the curve is a guess"
                )
                break
            self._say(f"a prompt of {tokens:,} tokens, twice, of which the first is not measured")
            self._lone(tokens)
            samples.append(self._lone(tokens))
        check_sound((), self._others)  # early, before the minutes of the rounds
        queue = self._shuffled(one.tokens for one in samples for _ in range(repeats_of(one.seconds)))
        known = {one.tokens: one.seconds for one in samples}
        for place, tokens in enumerate(queue):
            left = sum(known[one] for one in queue[place:])
            self._say(f"prompt {place + 1} of {len(queue)}: {tokens:,} tokens; about {left:.0f} s left")
            samples.append(self._lone(tokens))
        for _ in range(_MORE_ROUNDS):
            doubtful = [one for one in times_of(samples, fitted(samples, cache)) if not one.agrees]
            for one in doubtful:
                self._say(
                    f"once more {one.tokens:,} tokens: {one.quickest_seconds:.4g} to {one.slowest_seconds:.4g} s so far"
                )
                samples.append(self._lone(one.tokens))
        return samples

    def _decodes(self, prompt_tokens: int, prompt_seconds: float) -> dict[int, float]:
        """Return the step by batch, as far as the server runs the streams together."""
        steps: dict[int, float] = {}
        batch, step = 1, prompt_seconds
        while batch <= MAX_BATCH:
            answer = min(answer_tokens_for(batch, prompt_seconds, step), self._reach.context_tokens - prompt_tokens)
            if batch > 1 and answer * step > _LONGEST_SECONDS:
                self._notes.append(f"decode steps of {batch} streams were left out: their answers take too long")
                break
            self._say(f"decode steps with {batch} at once, {answer} tokens each")
            found: list[float] = []
            while len(found) < _REPEATS + _MORE_ROUNDS:
                try:
                    seconds = step_seconds(self._ask(batch, prompt_tokens, answer))
                except (RequestError, CapacityError) as error:
                    self._notes.append(f"{batch} streams at once failed, so decode steps end before: {error}")
                    return steps
                if seconds is None:
                    self._notes.append(f"{batch} streams did not run at once: decode steps end before")
                    return steps
                found.append(seconds)
                if len(found) >= _REPEATS and agreeing_step(found) is not None:
                    break
            if (agreed := agreeing_step(found)) is not None:
                steps[batch] = step = agreed
            else:
                self._notes.append(f"decode steps of {batch} streams were left out: no two of {len(found)} agree")
            batch *= 2
        return steps

    def _context_cost(self, prompt_tokens: int, most_tokens: int, step: float | None) -> float:
        """Return what each token of context, of which there may be so many, adds to a stream's step; 0 if not known."""
        longest = min(most_tokens, self._reach.context_tokens - ANSWER_TOKENS)
        if step is None or longest < 2 * prompt_tokens:
            return 0.0
        self._say(f"decode steps behind {longest:,} tokens")
        found = [step_seconds(self._ask(1, longest, ANSWER_TOKENS)) or step for _ in range(_REPEATS)]
        return max(0.0, (min(found) - step) / (longest - prompt_tokens))

    def _beside(self, lengths: Sequence[LengthTimes], steps: Mapping[int, float]) -> tuple[AddedTime, ...]:
        """Return what prompts of these lengths add to the steps of streams, as far as both run at once."""
        streams, found = min(_BESIDE_STREAMS, max(steps, default=0) // 2), list[AddedTime]()
        for one in lengths if streams else ():
            answer = 3 * BEGUN_TOKENS + math.ceil(one.seconds / min(steps.values()))
            if one.seconds > _LONGEST_BESIDE_SECONDS or _BESIDE_PROMPT_TOKENS + answer > self._reach.context_tokens:
                break
            self._say(f"a prompt of {one.tokens:,} tokens beside {streams} streams")
            try:
                added = [self._added(streams, answer, one.tokens) for _ in range(_REPEATS)]
            except (RequestError, CapacityError) as error:
                self._notes.append(f"a prompt beside {streams} streams failed: {error}")
                break
            seconds = [one for one in added if one is not None and one > 0]
            if 2 * len(seconds) > _REPEATS:
                found.append(AddedTime(tokens=one.tokens, seconds=statistics.median(seconds)))
        return tuple(found)

    def _added(self, streams: int, answer_tokens: int, tokens: int) -> float | None:
        (prompt,) = self._prompts(1, tokens)
        beside, lone = self._server.ask_beside(self._prompts(streams, _BESIDE_PROMPT_TOKENS), answer_tokens, prompt)
        self._check(beside, _BESIDE_PROMPT_TOKENS)
        self._check([lone], tokens)
        return added_seconds(beside, lone)

    def _lone(self, tokens: int) -> Sample:
        (answer,) = self._ask(1, tokens, 1)
        return Sample(tokens, answer.first_seconds)

    def _ask(self, batch: int, tokens: int, answer_tokens: int) -> list[StreamedAnswer]:
        answers = self._server.ask(self._prompts(batch, tokens), answer_tokens)
        self._check(answers, tokens)
        return answers

    def _check(self, answers: Sequence[StreamedAnswer], tokens: int) -> None:
        """Raise PeerError if these are no answers to new prompts of so many tokens. See who else was served."""
        for answer in answers:
            if answer.prompt_tokens not in (0, tokens):
                raise PeerError(f"the server counts {answer.prompt_tokens} tokens in a prompt of {tokens}")
            if answer.cached_tokens > 0:
                raise PeerError(
                    f"the server had {answer.cached_tokens} of {tokens} tokens in its cache, of a prompt that nobody "
                    "sent before; measure an instance, and no server in front of several"
                )
        if (others := self._server.others()) is not None:
            self._others.append(others)

    def _prompts(self, count: int, tokens: int) -> list[list[int]]:
        return [[self._draw() for _ in range(tokens)] for _ in range(count)]

    def _draw(self) -> int:
        return self._vocabulary[int(self._rng.random() * len(self._vocabulary))]

    def _shuffled(self, lengths: Iterable[int]) -> list[int]:
        return sorted(lengths, key=lambda _: self._rng.random())
