"""Runs the steps of a verification within its time, and keeps what each found."""

import time
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from prfaas.cli.verify.kit import Kit
from prfaas.cli.verify.record import StepOutcome, VerifiedStep
from prfaas.cli.verify.steps import PlannedStep, steps_of
from prfaas.cli.verify.ways import DoubtError, LeftOutError
from prfaas.errors import ConfigError, PrfaasError

_FIT: Final = 0.7
"""Share of the time that steps may be estimated at: they fail late, and wait for leases."""
_LEAST_TOKENS: Final = 512
_ERRORS: Final[dict[type[Exception], StepOutcome]] = {DoubtError: "proves little", LeftOutError: "left out"}

Tell = Callable[[VerifiedStep, float], None]
"""Is called with each result, and the seconds that are probably left."""


class Pace(NamedTuple):
    """How quick engines are, measured by two answers."""

    prompt_token_seconds: float
    answer_seconds: float

    def of(self, steps: Sequence[PlannedStep]) -> float:
        """Return the seconds that steps take."""
        return sum(one.prompt_tokens * self.prompt_token_seconds + one.answers * self.answer_seconds for one in steps)


def measure_pace(kit: Kit) -> Pace:
    """Return how quick the slower of both engines is. The first answers of an engine are left out."""
    worst = Pace(0.0, 0.0)
    tokens = min(kit.most_tokens, 4 * _LEAST_TOKENS)
    for engine in (kit.reference, kit.way.prefill) if kit.prefill_answers else (kit.reference,):
        times: list[float] = []
        for length in (tokens, 2, 2, tokens):
            prompt = kit.prompts.draw(length)
            began = time.perf_counter()
            kit.alone(prompt, engine)
            times.append(time.perf_counter() - began)
        short, long = times[2:]
        worst = Pace(max(worst.prompt_token_seconds, max(0.0, long - short) / tokens), max(worst.answer_seconds, short))
    return worst


def fit(kit: Kit, pace: Pace, seconds: float) -> list[PlannedStep]:
    """Return the steps, with the longest prompts that leave them within the time."""
    while pace.of(steps := steps_of(kit)) > _FIT * seconds and kit.most_tokens > 2 * _LEAST_TOKENS:
        kit.most_tokens //= 2
    return steps


def run_steps(
    kit: Kit, steps: Sequence[PlannedStep], pace: Pace, deadline: float, tell: Tell, results: list[VerifiedStep]
) -> None:
    """Run the steps until `deadline` (`time.monotonic`); add what each found to the results. What remains then is left
    out. Raises ConfigError where the engines want a key or a certificate."""
    for number, step in enumerate(steps):
        began = time.monotonic()
        result = VerifiedStep(step.claim, "left out", "the time is over", 0.0, is_due=True)
        if began < deadline:
            outcome, seen = _try(kit, step)
            result = VerifiedStep(step.claim, outcome, seen, time.monotonic() - began)
        results.append(result)
        tell(result, pace.of(steps[number + 1 :]))


def _try(kit: Kit, step: PlannedStep) -> tuple[StepOutcome, str]:
    try:
        return "holds", step.run(kit)
    except ConfigError:
        raise
    except PrfaasError as error:
        return _ERRORS.get(type(error), "fails"), str(error)
    except (AttributeError, LookupError, TypeError, ValueError) as error:  # anything may stand in an answer
        return "fails", f"an answer has another form: {error!r}"
