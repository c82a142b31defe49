"""Makes a profile of measured prompts, and says whether they are sound.

The median of each length counts, as a plan asks for what prompts usually take. It is believed where half of the repeats
are near it, and another one at least; else more repeats are needed, or a quiet server. A server whose other requests
were seen again and again slows them all alike, and no repeats show that.
"""

import math
import statistics
from collections.abc import Iterable, Sequence

import msgspec

from prfaas.capacity.builtin import DecodeStep
from prfaas.capacity.profile import Curve, Sample, prefill_seconds
from prfaas.errors import CapacityError
from prfaas.measure.answers import CacheBytes, StreamedAnswer
from prfaas.measure.curve import Point, PrefillTimes
from prfaas.measure.steps import StepTimes
from prfaas.wire.profile import Profile

FEW_TOKENS = 8
"""Of a prompt that shows what one costs however short it is."""
AGREEING = 1.15
"""Repeats are near the median that take at most this many times as long, or as short."""
APART = 1.3
"""A slowest repeat that takes more than this many times the quickest is noted."""
BUSY = 0.25
"""Of the looks at a server, those that saw other requests; more, and all times may be too long."""
_MISSED = 0.1
_FAR = 0.4
_CLASSES = 4  # classes of length for each doubling
_MIN_WINDOW_TOKENS = 8


class LengthTimes(msgspec.Struct, frozen=True, kw_only=True):
    """The times to the first token of the prompts of about one length, by the curve as if all had `tokens`."""

    tokens: int
    repeats: int
    seconds: float
    """The median."""
    near: int
    """The repeats near the median, itself included."""
    quickest_seconds: float
    slowest_seconds: float
    fitted_seconds: float

    @property
    def agrees(self) -> bool:
        return self.near >= max(2, self.repeats / 2)

    @property
    def is_apart(self) -> bool:
        return self.slowest_seconds > APART * self.quickest_seconds


class AddedTime(msgspec.Struct, frozen=True, kw_only=True):
    """What a prompt of `tokens` adds to the steps of streams that run beside it, all its chunks together."""

    tokens: int
    seconds: float


class Measurement(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured, of which model and where, and what a reader should know of it."""

    model: str
    source: str
    profile: Profile
    cache_source: str
    lengths: tuple[LengthTimes, ...]
    decode_context_tokens: int
    decode_steps: tuple[DecodeStep, ...]
    decode_token_seconds: float = 0.0
    """What each further token of its context adds to a stream's step."""
    least_prompt_seconds: float = 0.0
    """Of a prompt of FEW_TOKENS: what a chunk costs however short it is, and a step. 0: not known."""
    in_order: bool = False
    """Whether it computes prompts in order of arrival: engines that are none of ours do."""
    beside_decodes: tuple[AddedTime, ...] = ()
    """Shortest first. None: not known."""
    notes: tuple[str, ...] = ()

    @property
    def times(self) -> StepTimes:
        """The times as they were measured, those of prompts through the points and not by the fit."""
        points = [Point(one.tokens, one.seconds) for one in self.lengths]
        least = [Point(FEW_TOKENS, self.least_prompt_seconds)] if self.least_prompt_seconds else []
        beside = [Point(one.tokens, one.seconds) for one in self.beside_decodes]
        least_step = min((step.seconds for step in self.decode_steps), default=0.0)
        return StepTimes(
            PrefillTimes.through((*least, *points), self.profile),
            self.decode_steps,
            common_seconds=min(self.least_prompt_seconds, least_step),
            cut_seconds=max(0.0, self.least_prompt_seconds - least_step),
            context_tokens=self.decode_context_tokens,
            decode_token_seconds=self.decode_token_seconds,
            beside_decodes=PrefillTimes.through(beside, self.profile) if beside else None,
        )


def fitted(samples: Sequence[Sample], cache: CacheBytes) -> Profile:
    """Return the profile through the median of each class of length."""
    typical = [_typical(alike) for alike in _classes(samples).values()]
    profile = Curve.fitted(typical).profile(cache.state_bytes, cache.token_bytes)
    return msgspec.structs.replace(profile, samples=len(samples))


def repeated(samples: Sequence[Sample]) -> list[Sample]:
    """Return the samples of about a length that came more than once: what came once cannot be checked."""
    return [one for alike in _classes(samples).values() if len(alike) > 1 for one in alike]


def times_of(samples: Sequence[Sample], profile: Profile) -> tuple[LengthTimes, ...]:
    """Return what was measured beside the curve, shortest first. Within a class, times compare by the curve."""
    found: list[LengthTimes] = []
    for _, alike in sorted(_classes(samples).items()):
        tokens = _typical(alike).tokens
        expected = prefill_seconds(profile, tokens)
        ratios = sorted(one.seconds / prefill_seconds(profile, one.tokens) for one in alike)
        middle = statistics.median_low(ratios)
        found.append(
            LengthTimes(
                tokens=tokens,
                repeats=len(alike),
                seconds=middle * expected,
                near=sum(middle / AGREEING <= ratio <= middle * AGREEING for ratio in ratios),
                quickest_seconds=ratios[0] * expected,
                slowest_seconds=ratios[-1] * expected,
                fitted_seconds=expected,
            )
        )
    return tuple(found)


def check_sound(lengths: Sequence[LengthTimes], others_seen: Sequence[int]) -> list[str]:
    """Return what a reader should know; raises CapacityError where the times cannot be believed."""
    busy = sum(1 for others in others_seen if others > 0)
    if others_seen and busy > BUSY * len(others_seen):
        raise CapacityError(
            f"the server is busy: at {busy} of {len(others_seen)} looks it had up to {max(others_seen)} requests of "
            "others, which slow ours; measure when it has none, or another instance"
        )
    for one in lengths:
        if not one.agrees:
            raise CapacityError(
                f"prompts of {one.tokens:,} tokens took {one.quickest_seconds:.4g} to {one.slowest_seconds:.4g} s, "
                f"and {one.near} of {one.repeats} are near the median of {one.seconds:.4g} s: other work disturbs the "
                "server or this machine; measure again when both are quiet"
            )
    notes: list[str] = []
    if busy:
        notes.append(f"others had requests at {busy} of {len(others_seen)} looks; repeats agree all the same")
    if apart := [f"{one.tokens:,}" for one in lengths if one.is_apart]:
        notes.append(
            f"repeats of {', '.join(apart)} tokens differ by more than {APART - 1:.0%}; half are near the median"
        )
    for one in lengths:
        off = one.fitted_seconds / one.seconds - 1
        if abs(off) > _FAR:
            raise CapacityError(
                f"the curve says {one.fitted_seconds:.4g} s for {one.tokens:,} tokens, which took {one.seconds:.4g} s: "
                "fixed + token n + squared n^2 describes no such server; look whether it truncates prompts or caches"
            )
        if abs(off) > _MISSED:
            notes.append(
                f"the curve says {one.fitted_seconds:.4g} s for {one.tokens:,} tokens, {off:+.0%}: "
                "fixed + token n + squared n^2 does not describe this server there"
            )
    return notes


def step_seconds(answers: Sequence[StreamedAnswer]) -> float | None:
    """Return the time of a token while all the streams ran; None if they hardly ran together."""
    start = max(answer.marks[0].seconds for answer in answers)
    end = min(answer.marks[-1].seconds for answer in answers)
    steps: list[float] = []
    for answer in answers:
        marks = [mark for mark in answer.marks if start <= mark.seconds <= end]
        if not marks or (tokens := marks[-1].tokens - marks[0].tokens) < _MIN_WINDOW_TOKENS:
            return None
        steps.append((marks[-1].seconds - marks[0].seconds) / tokens)
    return sum(steps) / len(steps)


def agreeing_step(seconds: Iterable[float]) -> float | None:
    """Return the quickest of repeats if another one came near it."""
    first, second, *_ = *sorted(seconds), math.inf, math.inf
    return first if second <= AGREEING * first else None


def shown(lengths: Sequence[LengthTimes], most: int = 8) -> list[int]:
    """Return the lengths that stand for the curve: all, or some of many with the first and the last."""
    tokens = [one.tokens for one in lengths]
    if len(tokens) <= most:
        return tokens
    places = {round(place * (len(tokens) - 1) / (most - 1)) for place in range(most)}
    return [tokens[place] for place in sorted(places)]


def _classes(samples: Iterable[Sample]) -> dict[int, list[Sample]]:
    classes: dict[int, list[Sample]] = {}
    for sample in samples:
        classes.setdefault(round(_CLASSES * math.log2(sample.tokens)), []).append(sample)
    return classes


def _typical(alike: Sequence[Sample]) -> Sample:
    """Return the sample with the median pace; of an even number, the quicker one in the middle."""
    return sorted(alike, key=lambda sample: sample.seconds / sample.tokens)[(len(alike) - 1) // 2]
