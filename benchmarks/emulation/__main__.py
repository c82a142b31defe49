"""An emulated worker beside the engine whose measured profile it takes its time from, under the same requests.

    prfaas bench emulation [worker|vllm] [--seconds 20] [-o json]

The engine is measured as `prfaas profile measure` does, at more lengths. Then both get the same prompts at the same
moments: Poisson arrivals at shares of the rate that the profile says they can serve, of two mixes of lengths. The
simulator's instance gets them, too, with the same times. The engine's model is deep, so that steps take tens of
milliseconds: what is lost in timers and loops is small beside that.

A machine that others share is not always equally quick. So runs of both are made in turns, with a reference between
them, and the emulated worker's times are stretched by it. A pair in which the reference moved does not count, nor one
in which the machine kept an engine from running, or an emulated step from ending in time. Pairs are made again while
too few count, and the engine is measured anew where it is far off its profile.

Whoever emulates an engine by its profile has no deeper model, and a profile with the front's time in it. Both are
printed at the end of the table.
"""

import itertools
import statistics
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, Final

import msgspec
import typer
from benchmarks.emulation.engines import KINDS, Engine, Kind, worker
from benchmarks.emulation.load import MIXES, Mix, Outcome, Waits, capacity, drawn, met, reference_seconds
from benchmarks.emulation.pairs import MOST_MOVED, Pair, Runs, compared, two_pairs
from benchmarks.emulation.profile import TRIES, measured, own_times, simulated_waits, without
from benchmarks.report import Figure, run, say

from prfaas.errors import CapacityError, ConfigError
from prfaas.simulate.request import Arrival
from prfaas.util import Deadline

LOADS: Final = (0.5, 0.7, 0.9)
WANTED_PAIRS: Final = 2
"""Of each load and mix."""
MOST_OFF: Final = 0.1
"""How far the reference may be off what it was at the measurement: kinds of work change their pace unequally."""
TRIED_SECONDS: Final = 2700.0
"""Nothing is tried again after so long."""

Seconds = Annotated[float, typer.Option(min=1.0, help="Length of each run.")]
Chosen = Annotated[str, typer.Argument(help=f"What is emulated: {' or '.join(KINDS)}.")]


def figures(engine: Chosen = "worker", seconds: Seconds = 20.0) -> Iterator[Figure]:
    if engine not in KINDS:
        raise ConfigError(f"no engine is called {engine!r}: give {' or '.join(KINDS)}")
    kind, until, left_out, missing = KINDS[engine], Deadline(TRIED_SECONDS), 0, 0
    with tempfile.TemporaryDirectory() as folder, kind.start(Path(folder)) as real:
        bench = Bench(real, kind, Path(folder) / "profile.json")
        for mix, load in itertools.product(MIXES, LOADS):
            name, pairs = f"{mix.name} at {load:.0%}", list[Pair]()
            for _ in range(TRIES):
                made = bench.pairs(mix, load, seconds)
                pairs += [pair for pair in made if pair is not None]
                left_out += made.count(None)
                say(f"{name}: {len(pairs)} of {WANTED_PAIRS} pairs count")
                if len(pairs) >= WANTED_PAIRS or until.is_over:
                    break
            if pairs:
                yield from compared(name, pairs, kind.reach_percent)
            yield Figure(name=f"{name}: pairs of runs that count", value=len(pairs), unit="", better="higher")
            missing += not pairs
    yield Figure(name=f"pairs left out: the reference moved by {MOST_MOVED:.0%}, or no core", value=left_out, unit="")
    yield Figure(name="loads without a pair that counts", value=missing, unit="", reach=0)
    yield Figure(name="here alone: layers, as a factor of the model's", value=kind.depth, unit="")
    front_ms = 1000 * bench.own_seconds
    yield Figure(name="here alone: the front's own time is taken off the profile", value=front_ms, unit="ms")


class Bench:
    """An engine that runs, and what was measured of it last. The profile to emulate it by is written to `path`."""

    def __init__(self, real: Engine, kind: Kind, path: Path) -> None:
        self._real, self._kind, self._path = real, kind, path
        self._seeds = itertools.count()  # prompts that were met before are cached
        self._measure()
        self._own = own_times(path, self._found, kind.flags)
        say(f"the worker's own front takes {', '.join(f'{1000 * one.seconds:.1f}' for one in self._own.points)} ms")

    @property
    def own_seconds(self) -> float:
        """What the emulated worker's front adds to a time to the first token, in the mean of the lengths."""
        return statistics.mean(one.seconds for one in self._own.points)

    def pairs(self, mix: Mix, load: float, seconds: float) -> list[Pair | None]:
        """Make the runs of two pairs."""
        if abs((pace := self._pace()) - 1) > MOST_OFF:
            say(f"{self._real.url} takes {pace:.3f} of the time that it took when it was measured, which is done anew")
            try:
                self._measure()
            except CapacityError as error:
                say(f"what was measured before stays: {error}")
        rate = load * capacity(self._found, mix, self._kind)
        say(f"{mix.name} prompts at {load:.0%}: {rate:.2f} a second")
        return two_pairs(*(self._runs(drawn(mix, rate, seconds, seed), seed) for seed in self._two_seeds()))

    def _two_seeds(self) -> tuple[int, int]:
        return next(self._seeds), next(self._seeds)

    def _runs(self, arrivals: list[Arrival], seed: int) -> Runs:
        real = partial(met, self._real, arrivals, seed)
        return Runs(real, partial(self._emulated, arrivals, seed), self._pace)

    def _emulated(self, arrivals: list[Arrival], seed: int, pace: float) -> tuple[Outcome, Waits] | None:
        bare = without(self._found, self._own)
        self._path.write_bytes(msgspec.json.encode(bare))
        with worker("--emulate", str(self._path), "--stretch", f"{pace:.4f}", *self._kind.flags) as emulated:
            seen = met(emulated, arrivals, seed)
        if seen is None:
            return None
        return seen, simulated_waits(bare, self._own, pace, self._kind, arrivals)

    def _pace(self) -> float:
        """Return how long the reference takes, as a factor of what it took at the measurement."""
        pace = reference_seconds(self._real.url) / self._reference_seconds
        say(f"{self._real.url}: the reference takes {pace:.3f} of its time")
        return pace

    def _measure(self) -> None:
        before = reference_seconds(self._real.url)
        self._found = measured(self._real, self._kind.cache)
        self._reference_seconds = statistics.mean((before, reference_seconds(self._real.url)))


if __name__ == "__main__":
    run("emulation", __doc__, figures)
