"""The record of a run: one system of a case at one load, request by request.

Times are the case's own: what the clock showed, divided by the stretch of the emulated instances. Bytes and rates are
the case's, too: multiplied by the scale of the caches. So a record compares with a plan and a simulation as it stands.
A run is one file. A run that was interrupted leaves none, so a second call of the command does only what is missing.
"""

import math
from collections.abc import Callable, Iterable
from itertools import groupby
from typing import Final, Literal

import msgspec

from prfaas.errors import UNREADABLE, ConfigError
from prfaas.measure.emulated import FEWEST_STEPS, StepTiming, why_too_slow
from prfaas.simulate.scenario import PolicyName
from prfaas.wire.trace import Parts

VERSION: Final = 3
"""Of the record's form; a reader refuses others."""


_ALIKE: Final = ("software", "hardware", "instances", "link_mbps")
"""What the runs of one load have to share: figures of one load are of one system."""
_SAME_RATE: Final = 1e-3
_MOST_SENT_LATE: Final = 0.02
"""Of all times to a first token."""


class RunKey(msgspec.Struct, frozen=True, order=True):
    """A run of a case. `load` is the share of the planned lambda_max of this policy that arrives."""

    policy: PolicyName
    load: float
    seed: int
    threshold_tokens: int = 0
    """Where the threshold begins, and stays for `static`; 0: as the file or its plan says."""

    @property
    def name(self) -> str:
        """The file's, without its ending."""
        threshold = f"-at-{self.threshold_tokens}" if self.threshold_tokens else ""
        return f"{self.policy}{threshold}-{round(self.load * 100, 2):g}-{self.seed}"

    @property
    def without_seed(self) -> "RunKey":
        """What all runs of one system at one load share."""
        return msgspec.structs.replace(self, seed=0)


Loss = Literal["refused", "timeout", "failure"]
"""Why a request has no answer: the system said that it is full, or a time ran out, or anything else."""
MOST_LOST: Final = 0.01
"""Of the requests. Percentiles of the rest would flatter a system that loses more, for it serves the easy ones."""


class AnsweredRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request. `at_seconds` counts from the start of the run; `error` has the words of its loss."""

    at_seconds: float
    prompt_tokens: int
    sent_late_seconds: float = 0.0
    """How long after its time it was sent; a part of all times, which count from then."""
    ttft_seconds: float | None = None
    seconds: float | None = None
    """Until the last token."""
    offloaded: bool = False
    """Its prefill succeeded in another cluster."""
    fallback: bool = False
    parts: Parts = {}
    """Of the time to the first token: see `prfaas.wire.trace`."""
    lost: Loss | None = None
    error: str = ""


class Reading(msgspec.Struct, frozen=True, kw_only=True):
    """What the installation's own metrics said at one time."""

    at_seconds: float
    threshold_tokens: float | None = None
    link_mbps: float | None = None
    """What the link could carry, as the scheduler believes."""
    egress_mbps: float | None = None
    hub_prefills: float | None = None
    """Instances of the hub that prefill."""
    offload_instances: float | None = None


class MachineTiming(msgspec.Struct, frozen=True, kw_only=True):
    """Whether emulated time kept up during the run. None: nobody knows, because the metrics of all instances were not
    read, or because not all of them ran all the time, or had steps enough."""

    mean_late: float | None
    """How late a step ended in the mean, as a share of its own time; of the worst instance and kind of step."""
    late_share: float | None = None
    """Of the steps of the worst instance and kind, how many were late. None where none made enough, and in older
    records, too."""
    p99_late: float | None
    """The share of its own time by which a step ended late, at most, in 99 of 100 cases. None beyond all bounds."""
    busy_share: float | None
    """Of the machine's cores."""
    clock_off_seconds: float = 0.0
    """Between the clocks of the driver and of Prometheus, where that is more than an interval of its readings."""

    @property
    def why_invalid(self) -> str:
        """Why no figure of the run counts; empty if all do."""
        if self.clock_off_seconds:
            return (
                f"Prometheus' clock was {self.clock_off_seconds:.1f} s off the driver's, more than an interval "
                "of its readings: set both by one time server"
            )
        if self.mean_late is None:
            return (
                "nobody knows whether the machine kept the time: "
                f"an instance's metrics were not read, or it was restarted or replaced, or made no {FEWEST_STEPS} steps"
            )
        why = why_too_slow([StepTiming(self.mean_late, self.late_share)], self.busy_share)
        return f"the machine was too slow: {why}" if why else ""


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """One run, whole."""

    key: RunKey
    case: str
    """A digest of the case's file: records of another file are of another case."""
    rate_per_second: float
    """Of arrivals, planned."""
    instances: dict[str, int]
    """By pool and role."""
    stretch: float
    cache_scale: int
    link_mbps: int
    """Of the live link, by the machine's clock: what the member cluster declares, and what is shaped."""
    answers: tuple[AnsweredRequest, ...]
    readings: tuple[Reading, ...]
    machine: MachineTiming
    began_at: str
    """UTC, ISO 8601."""
    software: str
    """Version and commit."""
    hardware: str = ""
    """Processor, cores and memory of the machine that emulated all."""
    version: int = VERSION

    @property
    def lost(self) -> tuple[AnsweredRequest, ...]:
        return tuple(one for one in self.answers if one.lost)

    @property
    def why_invalid(self) -> str:
        """Why no figure of the run counts; empty if all do.

        A refusal is an answer to the load. A failure is none, and a timeout is of the clock: stretch does not move it.
        """
        if self.why_slow:
            return self.why_slow
        timeouts, failures = ([one for one in self.lost if one.lost == loss] for loss in ("timeout", "failure"))
        fallbacks = sum(one.fallback for one in self.answers)
        most = MOST_LOST * len(self.answers)
        if timeouts:
            return f"{len(timeouts)} of {len(self.answers)} requests met a timeout: {timeouts[0].error}"
        if len(failures) > most:
            return f"{len(failures)} of {len(self.answers)} requests failed: {failures[0].error}"
        if fallbacks > most:
            return f"{fallbacks} of {len(self.answers)} requests fell back, as transfers broke or their time ran out"
        return ""

    @property
    def why_slow(self) -> str:
        """Why the machine was too slow for the run, which may count when it is made again; empty if it was not."""
        if self.machine.why_invalid:
            return self.machine.why_invalid
        sent_late = math.fsum(one.sent_late_seconds for one in self.answers)
        waited = math.fsum(one.ttft_seconds or 0.0 for one in self.answers)
        if sent_late > _MOST_SENT_LATE * waited:
            return f"requests were sent {sent_late / len(self.answers):.2f} s late in the mean: the driver was too slow"
        return ""


def in_order(run: Run) -> tuple[RunKey, int]:
    """Sort runs by their load, and by their seed within it."""
    return run.key.without_seed, run.key.seed


class ExcludedRun(msgspec.Struct, frozen=True):
    """A run, by its name, of which no figure counts."""

    name: str
    why: str


def read_runs(
    files: Iterable[tuple[str, bytes]], case: str, rate_of: Callable[[RunKey], float]
) -> tuple[list[Run], list[ExcludedRun]]:
    """Return the runs of a case in order, and the files that hold none that counts, from names and contents of files.

    `rate_of` says at which rate requests arrive in a run, by today's plan. Runs of one load are made alike: those that
    are unlike its latest are left out, as if they were not there.
    """
    runs: list[Run] = []
    excluded: list[ExcludedRun] = []
    for name, content in files:
        try:
            runs.append(_at_rate(read_run(content, case), rate_of))
        except ConfigError as error:
            excluded.append(ExcludedRun(name, str(error)))
    alike: list[Run] = []
    for _, group in groupby(sorted(runs, key=in_order), lambda run: run.key.without_seed):
        latest = max(of_load := list(group), key=lambda run: run.began_at)
        for run in of_load:
            if why := _unlike(run, latest):
                excluded.append(ExcludedRun(run.key.name, why))
            else:
                alike.append(run)
    return alike, excluded


def _at_rate(run: Run, rate_of: Callable[[RunKey], float]) -> Run:
    planned = rate_of(run.key)
    if abs(run.rate_per_second / planned - 1) > _SAME_RATE:
        raise ConfigError(
            f"{run.rate_per_second:.4g} requests a second came, and by today's plan {planned:.4g} would: "
            "run the load again"
        )
    return run


def _unlike(run: Run, latest: Run) -> str:
    """Return in what a run differs from the latest of its load; empty if in nothing."""
    name = next((name for name in _ALIKE if getattr(run, name) != getattr(latest, name)), None)
    if name is None:
        return ""
    return (
        f"its {name} is {getattr(run, name)}, and of {latest.key.name}, the latest of its load, "
        f"{getattr(latest, name)}: run the load again"
    )


def read_run(content: bytes, case: str) -> Run:
    """Return the run that a file holds. Raises ConfigError for a file that is torn, of another version or case."""
    try:
        version = msgspec.json.decode(content, type=_Versioned).version
        if version != VERSION:
            raise ConfigError(f"it is a record of version {version}, and this is {VERSION}: run the load again")
        run = msgspec.json.decode(content, type=Run)
    except UNREADABLE as error:
        raise ConfigError(f"it is no whole record ({error}): delete it, and run the load again") from error
    if run.case != case:
        raise ConfigError("it is of another case, or the case's file has changed since: run the load again")
    return run


class _Versioned(msgspec.Struct):
    version: int
