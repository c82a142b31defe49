"""The cases of a part, and a part's run in a process of its own.

A part that hangs, or that breaks the device for its process, costs the other parts nothing. Figures come as they are
measured, so a deadline takes only those that are still to come.
"""

import importlib
import multiprocessing
import traceback
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection
from typing import NamedTuple

from benchmarks.report import Figure, say

from prfaas.util import Deadline

END_SECONDS = 5.0


class Case(NamedTuple):
    """What is measured together. Without its figures the run fails if it is a `must`, and with figures out of their
    reach if it is a `check`."""

    name: str
    measure: Callable[[], Iterable[Figure]]
    is_must: bool = True
    is_check: bool = False


class Part(NamedTuple):
    """A module whose `cases(device)` are to take so many seconds at most."""

    module: str
    seconds: float

    def cases(self, device: str) -> list[Case]:
        return importlib.import_module(self.module).cases(device)


# Wrong bytes cost least to find.
PARTS = (
    Part("benchmarks.device.blocks", 60),
    Part("benchmarks.device.worker", 240),
    Part("benchmarks.device.copies", 120),
    Part("benchmarks.vllm_stall", 90),
)


class Outcome(NamedTuple):
    """A case's figures, or why there are none."""

    case: Case
    figures: list[Figure]
    reason: str = ""

    @property
    def failures(self) -> list[str]:
        """Why the run fails."""
        if self.reason:
            return [f"{self.case.name}: {self.reason}"] if self.case.is_must else []
        return [
            f"{one.name}: {one.value:g} {one.unit}, and at most {one.reach:g} is right"
            for one in self.figures
            if self.case.is_check and one.reach is not None and not one.value <= one.reach  # NaN, too
        ]


def run_part(part: Part, device: str, deadline: Deadline) -> list[Outcome]:
    """Measure a part's cases until its time or the whole run's is over."""
    cases, found, why = part.cases(device), dict[str, Outcome](), "the time was over"
    own_deadline = Deadline(min(part.seconds, deadline.left_seconds))
    if not cases or own_deadline.is_over:
        return [Outcome(case, [], why) for case in cases]
    say(f"{part.module}: {len(cases)} cases")
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe(duplex=False)
    process = spawn.Process(target=_measure, args=(theirs, part, device))
    process.start()
    theirs.close()
    while ours.poll(max(0.0, own_deadline.left_seconds)):
        try:
            name, figures, reason = ours.recv()
        except EOFError:
            why = "its process has ended"
            break
        case = next(case for case in cases if case.name == name)
        found[name] = Outcome(case, figures, reason)
        say(f"{name}: {reason or ', '.join(f'{one.value:.4g} {one.unit}' for one in figures)}")
    process.join(END_SECONDS if len(found) == len(cases) else 0)
    process.kill()
    process.join(END_SECONDS)  # a driver may keep it for ever
    ours.close()
    return [found.get(case.name) or Outcome(case, [], why) for case in cases]


def _measure(end: Connection, part: Part, device: str) -> None:
    """Be a part's process: measure case after case, and say each one's figures, or why there are none."""
    for case in part.cases(device):
        try:
            end.send((case.name, list(case.measure()), ""))
        except Exception as error:  # the next case may be right
            traceback.print_exc()
            end.send((case.name, [], f"{type(error).__name__}: {error}".partition("\n")[0]))
