"""An installation of emulated instances, asked by our load maker and by others' for the same at the same times.

It is that of `prfaas bench evaluation`, with a threshold that stays: one that moves might treat two runs differently.
Requests come at random, at 70 % of what the plan carries, and their lengths differ. One comes alone before the rest:
what a load maker does once, at its first request, delays no other. All times are twice as long as the case has them,
for a load maker takes a part of the machine, too, and all figures are those of the clock.
"""

import random
import statistics
import tempfile
from collections.abc import Awaitable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from benchmarks.evaluation.compared import SHORT
from benchmarks.outside.load_tools import LOAD_TOOLS, Seen, label_of, replay
from benchmarks.report import Figure, say

from prfaas.errors import PeerError
from prfaas.evaluate.case import Case, arrivals_of, scenario_of
from prfaas.evaluate.record import AnsweredRequest, RunKey
from prfaas.simulate.request import Arrival
from prfaas_sandbox.demo.install import repository_root
from prfaas_sandbox.evaluate.campaign import read_case
from prfaas_sandbox.evaluate.drive import Driver
from prfaas_sandbox.evaluate.live import live_case
from prfaas_sandbox.evaluate.objects import MODEL, instances
from prfaas_sandbox.evaluate.readings import RunMetrics
from prfaas_sandbox.progress import progress
from prfaas_sandbox.tools import ensure_tools

RUN: Final = RunKey("static", 0.7, 1)
REQUESTS: Final = 250
"""More than the short form has: what is compared is 5 %."""
STRETCH: Final = 2.0
"""At 1 steps ended 3 % of their time late beside any of the load makers, and no run counted."""
LEAD_SECONDS: Final = 5.0
REACH: Final = 0.05
OURS: Final = "prfaas"


class Load(NamedTuple):
    """What a load maker saw that was to ask so often, and why its run gives no figure, if so."""

    asked: int
    seen: Seen
    why_invalid: str


async def loads(programs: dict[str, Path]) -> dict[str, Load]:
    """Return what our load maker saw, and then each of these."""
    case = read_case(repository_root() / SHORT.file, REQUESTS, STRETCH, SHORT.cache_scale)
    requests, count = schedule(case), sum(instances(scenario_of(case, RUN)).values())

    async def load(sending: Awaitable[Seen], metrics: RunMetrics) -> Load:
        await metrics.begin()
        seen = await sending
        return Load(len(requests), seen, (await metrics.machine(count)).why_invalid)

    with tempfile.TemporaryDirectory() as made:
        async with live_case(case, Path(made), Path(".prfaas"), say) as live:
            await live.prepare([RUN])
            async with live.serving(RUN) as (url, metrics), Driver.connected(url, MODEL, STRETCH, RUN.seed) as driver:
                # Counters that are first read after a run began say nothing of it.
                await driver.warm_up(case.file.workload.max_tokens)
                found = {OURS: await load(our_replay(driver, requests), metrics)}
                for tool, program in programs.items():
                    say(f"{label_of(tool)}: {len(requests)} requests")
                    (folder := Path(made) / tool).mkdir()
                    found[tool] = await load(replay(tool, program, by_the_clock(requests), url, folder), metrics)
    return found


async def our_replay(driver: Driver, requests: Sequence[Arrival]) -> Seen:
    return seen_of(await driver.run(requests, say))


def by_the_clock(requests: Iterable[Arrival]) -> list[Arrival]:
    """Return the requests with the moments at which they are sent."""
    return [one._replace(at_seconds=STRETCH * one.at_seconds) for one in requests]


def schedule(case: Case) -> list[Arrival]:
    """Return the requests: those of a run, and a short one a while before them."""
    run = list(arrivals_of(case, RUN, random.Random))
    first = Arrival(0.0, min(one.input_tokens for one in run), run[0].output_tokens)
    return [first, *(one._replace(at_seconds=LEAD_SECONDS + one.at_seconds) for one in run)]


def seen_of(answers: Sequence[AnsweredRequest]) -> Seen:
    """Return what our load maker saw, by the clock. Its answers are in order of arrival, with times of the case. Raises
    PeerError with fewer than two."""
    whole = [(one, first, end) for one in answers if (first := one.ttft_seconds) and (end := one.seconds)]
    if len(whole) < 2:
        raise PeerError(f"our load maker had {len(whole)} answers: {answers[0].error or 'nobody knows why'}")
    waits = [STRETCH * first for _, first, _ in whole]
    seconds = STRETCH * (max(one.at_seconds + end for one, _, end in whole) - answers[0].at_seconds)
    p90 = statistics.quantiles(waits, n=10, method="inclusive")[-1]  # between two values, as the tools take it
    return Seen(len(whole), statistics.mean(waits), p90, len(whole) / seconds)


def ensure_programs(tools: Sequence[str]) -> dict[str, Path]:
    """Return the tools' programs; they and those of Kubernetes are installed if needed."""
    with progress() as report:
        ensure_tools(report)
        return {tool: LOAD_TOOLS[tool].program(report) for tool in tools}


def load_figures(found: dict[str, Load]) -> Iterator[Figure]:
    """Yield how far each load maker's figures are off ours."""
    ours = found[OURS].seen
    for name, (asked, seen, why_invalid) in found.items():
        label = OURS if name == OURS else label_of(name)
        if why_invalid:
            say(f"{label}: {why_invalid}")
        yield Figure(name=f"{label}: runs that give no figure", value=bool(why_invalid), unit="", reach=0)
        yield Figure(name=f"{label}: requests without an answer", value=asked - seen.answered, unit="", reach=0)
        if name == OURS:
            continue
        for what, unit, theirs, mine in (
            ("mean TTFT", "s", seen.mean_seconds, ours.mean_seconds),
            ("P90 of TTFT", "s", seen.p90_seconds, ours.p90_seconds),
            ("throughput", "requests/s", seen.requests_per_second, ours.requests_per_second),
        ):
            better = "higher" if what == "throughput" else "lower"
            rival = {"rival": "our load maker", "rival_value": mine}
            yield Figure(name=f"{label}: {what}", value=theirs, unit=unit, better=better, **rival)
            off = abs(theirs / mine - 1)
            yield Figure(name=f"{label}: {what}, off ours by", value=off, unit="of it", reach=REACH)
