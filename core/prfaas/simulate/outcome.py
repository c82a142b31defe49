"""Counts the requests of a run as they end, and sums them up: every request ends exactly once."""

import math
from array import array
from collections.abc import Sequence
from typing import Literal

import msgspec

from prfaas.errors import InternalError
from prfaas.simulate.request import Request

Outcome = Literal["completed", "refused"]


class Times(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds to the first token; all zero when nothing was served."""

    mean: float
    p50: float
    p90: float
    p99: float


class Interval(msgspec.Struct, frozen=True, kw_only=True):
    """The short loop's measurements and threshold at one time; the utilisation is the busiest link's."""

    at_seconds: float
    threshold_tokens: int
    utilisation_percent: float
    sent_bytes: float
    """Over all links, since the run began."""
    unsent_bytes: float
    in_flight: int
    hub_prefills: int
    """N_p: instances of the hub that prefill."""
    offload_instances: int
    """Of all offload pools, those that serve."""


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """One run. Rates are means over `seconds`, from the first arrival to the last completion."""

    requests: int
    completed: int
    refused: int
    rerouted: int
    """Requests that were given more than one route."""
    offloaded: int
    """Requests whose first route was an offload, served or not."""
    seconds: float
    requests_per_second: float
    ttft_seconds: Times
    ttft_offloaded_seconds: Times
    ttft_local_seconds: Times
    offloaded_fraction: float
    egress_gbps: float
    hit_rate: float
    """Share of the prompts' tokens that no instance had to compute; reroutes compute some twice."""
    slo_attainment: float
    """Share of requests whose first token came within the limit; a refused one counts against it."""
    timeline: tuple[Interval, ...] = ()


class Tally:
    """Counts requests as they end. The first `warmup` of them are served but not timed."""

    def __init__(self, slo_ttft_seconds: float = math.inf, warmup: int = 0):
        self._slo_ttft_seconds = slo_ttft_seconds
        self._warmup = warmup
        self._offloaded_seconds = array("d")
        self._local_seconds = array("d")
        self._ends: dict[Outcome, int] = {"completed": 0, "refused": 0}
        self.arrived = 0
        self._rerouted = 0
        self._offloaded = 0
        self._prompt_tokens = 0
        self.computed_tokens = 0
        self._first_seconds = math.inf
        self._last_seconds = 0.0
        self.timeline: list[Interval] = []

    @property
    def completed(self) -> int:
        return self._ends["completed"]

    @property
    def ended(self) -> int:
        return sum(self._ends.values())

    def arrive(self, request: Request) -> None:
        self.arrived += 1
        self._prompt_tokens += request.arrival.input_tokens
        self._first_seconds = min(self._first_seconds, request.arrival.at_seconds)

    def end(self, request: Request, outcome: Outcome, now_seconds: float) -> None:
        self._ends[outcome] += 1
        self._rerouted += request.attempts > 1
        self._last_seconds = max(self._last_seconds, now_seconds)
        offloaded = request.began is not None and request.began.kind == "offload"
        self._offloaded += offloaded
        if request.first_token_seconds is not None and request.index >= self._warmup:
            waited_seconds = request.first_token_seconds - request.arrival.at_seconds
            (self._offloaded_seconds if offloaded else self._local_seconds).append(waited_seconds)

    def result(self, sent_bytes: float) -> Result:
        """Return the summary; raises InternalError where a request was lost, or ended twice."""
        if self.ended != self.arrived:
            raise InternalError(f"{self.arrived} requests came and {self.ended} ended")
        seconds = max(0.0, self._last_seconds - self._first_seconds) if self.arrived else 0.0
        everyone = self._offloaded_seconds + self._local_seconds
        timed = max(1, self.arrived - min(self._warmup, self.arrived))
        in_time = sum(waited <= self._slo_ttft_seconds for waited in everyone)
        return Result(
            requests=self.arrived,
            completed=self._ends["completed"],
            refused=self._ends["refused"],
            rerouted=self._rerouted,
            offloaded=self._offloaded,
            seconds=seconds,
            requests_per_second=_ratio(self._ends["completed"], seconds),
            ttft_seconds=times(everyone),
            ttft_offloaded_seconds=times(self._offloaded_seconds),
            ttft_local_seconds=times(self._local_seconds),
            offloaded_fraction=_ratio(self._offloaded, self.arrived),
            egress_gbps=_ratio(sent_bytes * 8 / 1e9, seconds),
            hit_rate=max(0.0, 1 - _ratio(self.computed_tokens, self._prompt_tokens)) if self.arrived else 0.0,
            slo_attainment=in_time / timed,
            timeline=tuple(self.timeline),
        )


def times(seconds: Sequence[float]) -> Times:
    """Return mean and percentiles; a percentile is a value that occurred."""
    if not seconds:
        return Times(mean=0.0, p50=0.0, p90=0.0, p99=0.0)
    ordered = sorted(seconds)
    p50, p90, p99 = (ordered[min(len(ordered) - 1, math.ceil(share * len(ordered)) - 1)] for share in (0.5, 0.9, 0.99))
    return Times(mean=math.fsum(ordered) / len(ordered), p50=p50, p90=p90, p99=p99)


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 0.0
