"""Runs systems of a case one after the other in a sandbox: two clusters, the operator, a shaped link, Prometheus.

Every run starts its own pods, so that no cache, role or threshold of another run is left. A run is written when it is
whole. An invalid one, such as of a machine that was too slow, is tried once again, and kept if it is invalid again. A
run that fails leaves nothing, and the others go on; where none can be kept, all end.
"""

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import msgspec

from prfaas.errors import ConfigError, PrfaasError
from prfaas.evaluate.case import Case, arrivals_of, longest_tokens, rate_per_second, run_seconds, scenario_of
from prfaas.evaluate.record import Run, RunKey
from prfaas.kube.session import Object
from prfaas.simulate.scenario import Scenario
from prfaas.util import replace_file
from prfaas_sandbox.demo.install import MEMBER, NAMESPACE, ExampleInstallation
from prfaas_sandbox.environment import ClusterAccess, Environment
from prfaas_sandbox.evaluate.drive import Driver
from prfaas_sandbox.evaluate.made_with import hardware, software
from prfaas_sandbox.evaluate.objects import (
    MODEL,
    OF_A_RUN,
    POLICY,
    CaseScale,
    instances,
    is_scaled,
    live_mbps,
    pool_objects,
    profiles_object,
    utilisation_query,
)
from prfaas_sandbox.evaluate.readings import RunMetrics
from prfaas_sandbox.progress import OnProgress
from prfaas_sandbox.sandbox import Sandbox

READY_SECONDS: Final = 300.0
GONE_SECONDS: Final = 120.0
_KINDS: Final = "prfaaspolicies,prefillpools,decodepools"
"""In the order in which they are removed."""


class LiveCase:
    """A case in an installation without objects. `folder` keeps its runs; an invalid one is made `tries` times."""

    def __init__(self, installation: ExampleInstallation, case: Case, folder: Path, report: OnProgress, tries: int = 2):
        self._installation, self._environment = installation, installation.environment
        self._case, self._folder, self._report, self._tries = case, folder, report, tries
        self._scale = CaseScale(stretch=case.stretch, cache_scale=case.cache_scale)
        self._software, self._hardware = software(), hardware()

    async def run_all(self, keys: Sequence[RunKey]) -> dict[RunKey, str]:
        """Make the runs in this order, and write each when it is whole. Return those that failed, with the reason.

        Raises ConfigError if the folder takes no run.
        """
        await self.prepare(keys)
        failed: dict[RunKey, str] = {}
        left_seconds = sum(run_seconds(self._case, key) for key in keys)
        for number, key in enumerate(keys, 1):
            self._report(f"run {number} of {len(keys)}: {key.name}; {_minutes(left_seconds)} left")
            try:
                await self._try(key)
            except ConfigError:  # the next one cannot be kept either
                raise
            except (PrfaasError, OSError, ExceptionGroup) as error:  # the next one has pods of its own
                failed[key] = _why(error)
                self._report(f"{key.name} failed: {failed[key]}")
            left_seconds -= run_seconds(self._case, key)
        return failed

    async def _try(self, key: RunKey) -> None:
        for _ in range(self._tries):
            run = await self._run(key)
            if run.why_invalid:
                self._report(f"{key.name} is invalid: {run.why_invalid}")
            if not run.why_slow:
                return

    async def prepare(self, keys: Sequence[RunKey]) -> None:
        """Have the profiles in both clusters, and the link's query with stretched windows."""
        profiles = profiles_object(scenario_of(self._case, key) for key in keys)
        for cluster in (self._environment.hub, self._environment.member):
            await _apply(self._environment, cluster, [profiles])
        patch = json.dumps({"spec": {"link": {"utilisationQuery": utilisation_query(self._scale)}}})
        words = ("patch", "membercluster", MEMBER, "--type=merge", "-p", patch)
        await self._environment.kubectl(self._environment.hub, "-n", NAMESPACE, *words)

    async def _run(self, key: RunKey) -> Run:
        """Make one run, and write it before its pods go."""
        case, scenario = self._case, scenario_of(self._case, key)
        began_at = datetime.now(UTC).isoformat(timespec="seconds")
        async with self.serving(key) as (url, metrics), Driver.connected(url, MODEL, case.stretch, key.seed) as driver:
            await driver.warm_up(case.file.workload.max_tokens)
            await metrics.begin()
            async with changing_link(self._environment, scenario, self._scale):
                answers = await driver.run(arrivals_of(case, key, random.Random), self._report)
            run = Run(
                key=key,
                case=case.digest,
                rate_per_second=rate_per_second(case, key),
                instances=instances(scenario),
                stretch=case.stretch,
                cache_scale=case.cache_scale,
                link_mbps=live_mbps(case),
                answers=answers,
                machine=await metrics.machine(sum(instances(scenario).values()), is_scaled(scenario)),
                readings=await metrics.readings(),
                began_at=began_at,
                software=self._software,
                hardware=self._hardware,
            )
            self._keep(run)
        return run

    @asynccontextmanager
    async def serving(self, key: RunKey) -> AsyncIterator[tuple[str, RunMetrics]]:
        """Have a run's system; give its gateway's address, and what reads its metrics."""
        await self._environment.shape_link(live_mbps(self._case))
        await self._environment.restore_link()  # the run before may have cut it
        async with self._system(scenario_of(self._case, key), longest_tokens(self._case, key)) as url:
            metrics = RunMetrics(self._environment.prometheus_url, self._scale)
            try:
                yield url, metrics
            finally:
                await metrics.close()

    def _keep(self, run: Run) -> None:
        path = self._folder / f"{run.key.name}.json"
        try:
            replace_file(path, msgspec.json.encode(run))
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {error}; make room, and call again") from error

    @asynccontextmanager
    async def _system(self, scenario: Scenario, longest: int) -> AsyncIterator[str]:
        """Have a system's pools and policy, for requests of at most so many tokens; give its gateway's address."""
        objects = pool_objects(scenario, self._scale, longest)
        hub = self._environment.hub
        await self._remove()  # of a run before that would not go
        try:
            await _apply(self._environment, hub, objects)
            await self._installation.wait_ready("prfaaspolicy", POLICY, timeout_seconds=READY_SECONDS)
            for one in objects:
                await self._installation.wait_ready(one["kind"], one["metadata"]["name"], timeout_seconds=READY_SECONDS)
            if scenario.offloads and scenario.policy.threshold.mode != "Fixed":
                await self._installation.wait_for("LinkHealthy", "prfaaspolicy", POLICY, timeout_seconds=READY_SECONDS)
            yield await self._environment.forward(hub, NAMESPACE, f"{POLICY}-gateway", 80)
        finally:
            try:
                await self._remove()
            except PrfaasError as error:  # what was measured stays; the next run waits for it
                self._report(f"its pods have not gone yet: {error}")

    async def _remove(self) -> None:
        """Remove the pools and the policy of whatever run is left, and wait until they are gone."""
        words = ("delete", _KINDS, f"--selector={OF_A_RUN}", f"--timeout={GONE_SECONDS:.0f}s", "--ignore-not-found")
        await self._environment.kubectl(self._environment.hub, "-n", NAMESPACE, *words)


@asynccontextmanager
async def changing_link(environment: Environment, scenario: Scenario, scale: CaseScale) -> AsyncIterator[None]:
    """Let the link follow the case's schedule from now on. Raises PeerError in the end if it could not be changed."""
    changes = asyncio.create_task(_change_link(environment, scenario, scale))
    try:
        yield
    finally:
        changes.cancel()
        with suppress(asyncio.CancelledError):
            await changes


async def _change_link(environment: Environment, scenario: Scenario, scale: CaseScale) -> None:
    began = time.monotonic()
    for at_seconds, mbps in (step for shape in scenario.conditions.values() for step in shape.schedule):
        await asyncio.sleep(max(0.0, began + at_seconds * scale.stretch - time.monotonic()))
        if mbps > 0:
            await environment.shape_link(scale.link_mbps(mbps))
            await environment.restore_link()
        else:
            await environment.cut_link()


@asynccontextmanager
async def live_case(case: Case, folder: Path, state: Path, report: OnProgress) -> AsyncIterator[LiveCase]:
    """Start a sandbox, install prfaas, and end all of it after the block. `folder` keeps the runs."""
    mbps = live_mbps(case)
    scrape_seconds = CaseScale(stretch=case.stretch, cache_scale=case.cache_scale).whole_seconds(1)
    async with Sandbox.start(
        state / "sandbox", link_mbps=mbps, scrape_seconds=scrape_seconds, report=report
    ) as sandbox:
        installation = await ExampleInstallation.without_objects(sandbox, report=report, link_mbps=mbps)
        yield LiveCase(installation, case, folder, report)


async def evaluate(
    case: Case,
    next_runs: Callable[[Collection[RunKey]], Sequence[RunKey]],
    folder: Path,
    state: Path,
    report: OnProgress,
) -> dict[RunKey, str]:
    """Make runs in a sandbox until `next_runs`, given those that were tried, says none. Return the runs that failed,
    with the reason."""
    failed: dict[RunKey, str] = {}
    tried: set[RunKey] = set()
    async with live_case(case, folder, state, report) as live:
        while keys := next_runs(tried):
            failed |= await live.run_all(keys)
            tried.update(keys)
    return failed


async def _apply(environment: Environment, cluster: ClusterAccess, objects: Sequence[Object]) -> None:
    listed = {"apiVersion": "v1", "kind": "List", "items": list(objects)}
    await environment.kubectl(cluster, "apply", "-f", "-", stdin=json.dumps(listed))


def _why(error: BaseException) -> str:
    """Return an error in words; of several at once, those of the first."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return str(error) or type(error).__name__


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:.0f} minutes" if seconds >= 90 else f"{seconds:.0f} s"
