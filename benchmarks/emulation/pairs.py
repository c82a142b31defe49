"""Which runs count, and what they say: pairs of a real and an emulated run, close in time, of the same requests.

Four runs make two pairs: real, emulated, emulated, real. So what changes steadily meets both alike. The reference is
measured before the first and after each. A pair counts where neither run says that it does not, and where the three
references around it are within a few per cent.
"""

import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple

from benchmarks.emulation.load import Outcome, Waits
from benchmarks.report import Figure

MOST_MOVED: Final = 0.03
"""Of the reference, within a pair."""
REACH_SIMULATED_PERCENT: Final = 5.0


class Pair(NamedTuple):
    """The same requests, served by the engine and by an emulated one; and the simulator's times to the first token."""

    real: Outcome
    emulated: Outcome
    simulated: Waits


class Runs(NamedTuple):
    """How the runs are made. `emulated` gets the pace, as a factor of the profile's times; it returns the simulator's
    times, too. Runs that do not count return None. `reference` returns the reference's pace."""

    real: Callable[[], Outcome | None]
    emulated: Callable[[float], tuple[Outcome, Waits] | None]
    reference: Callable[[], float]


def two_pairs(first: Runs, second: Runs) -> list[Pair | None]:
    """Make the runs of two pairs, each with its own requests; None in place of one that does not count. An emulated run
    has the pace of the real one if that was before, else that of the moment before it."""
    paces = [first.reference()]
    real = first.real()
    paces.append(first.reference())
    emulated = first.emulated(statistics.mean(paces))
    paces.append(first.reference())
    made = [paired(real, emulated, paces)]
    paces = paces[-1:]
    emulated = second.emulated(paces[0])
    paces.append(second.reference())
    real = second.real()
    paces.append(second.reference())
    return [*made, paired(real, emulated, paces)]


def paired(real: Outcome | None, emulated: tuple[Outcome, Waits] | None, paces: Sequence[float]) -> Pair | None:
    """Return a pair, or None if it does not count."""
    if real is None or emulated is None or max(paces) / min(paces) - 1 > MOST_MOVED:
        return None
    return Pair(real, *emulated)


def mean_of(pairs: Sequence[Pair]) -> Pair:
    """Return the mean of each figure."""

    def mean(outcomes: Sequence[Outcome]) -> Outcome:
        return Outcome(*(statistics.mean(values) for values in zip(*outcomes, strict=True)))

    real, emulated = mean([one.real for one in pairs]), mean([one.emulated for one in pairs])
    simulated = Waits(*(statistics.mean(values) for values in zip(*(one.simulated for one in pairs), strict=True)))
    return Pair(real, emulated, simulated)


def compared(name: str, pairs: Sequence[Pair], reach_percent: float) -> Iterator[Figure]:
    """Yield each figure of both, and by how much the emulated one is off; and the simulator beside the latter."""
    real, emulated, simulated = mean_of(pairs)
    for what, unit, better, factor, theirs, ours in (
        ("mean TTFT", "ms", "lower", 1000, real.mean_seconds, emulated.mean_seconds),
        ("P90 of TTFT", "ms", "lower", 1000, real.p90_seconds, emulated.p90_seconds),
        ("throughput", "tokens/s", "higher", 1, real.tokens_per_second, emulated.tokens_per_second),
    ):
        rival = {"rival": "the real engine", "rival_value": factor * theirs}
        yield Figure(name=f"{name}: {what}", value=factor * ours, unit=unit, better=better, **rival)
        yield Figure(name=f"{name}: {what} off by", value=100 * abs(ours / theirs - 1), unit="%", reach=reach_percent)
    for what, ours, theirs in (
        ("mean TTFT", simulated.mean_seconds, emulated.mean_seconds),
        ("P90 of TTFT", simulated.p90_seconds, emulated.p90_seconds),
    ):
        off = 100 * abs(ours / theirs - 1)
        yield Figure(
            name=f"{name}: simulated {what} off the emulated by", value=off, unit="%", reach=REACH_SIMULATED_PERCENT
        )
