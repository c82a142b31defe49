"""The steps of the demo: install, prompts of many lengths, a link that narrows and widens, a killed worker.

Any engine runs through the same steps; one with two decode instances loses one of them in the middle of a stream.
Each step drives the running system only from outside: HTTP to the gateway, tc on the link, a signal to a process. Each
step records the results.
"""

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import httpx
import msgspec

from prfaas.names import HUB
from prfaas.util import Deadline
from prfaas_sandbox.demo.client import DemoClient, text_of
from prfaas_sandbox.demo.decide import (
    KILL_CHOICES,
    MOST_NARROW_MBPS,
    STREAM_CHOICES,
    DrillChoice,
    cache_bytes,
    kill_moment,
    load_tokens,
    narrower,
)
from prfaas_sandbox.demo.display import DemoDisplay, summary
from prfaas_sandbox.demo.install import MEMBER, OFFLOAD_POOL, ExampleFile, ExampleInstallation
from prfaas_sandbox.demo.logs import PodLogs
from prfaas_sandbox.demo.records import KILLED, FailureDrill, RequestRecord, StreamDrill, ThresholdSample, find_problems
from prfaas_sandbox.sandbox import Sandbox

LENGTHS = (100, 300, 600, 1_200, 2_500, 5_000, 10_000, 16_000)
WIDE_MBPS, LOAD_CLIENTS = 100, 3
AGAIN_TOKENS = 8_000
STREAM_PROMPT_TOKENS, STREAM_EVENTS = 200, 60  # so many events have come when the instance is killed
# Waits end when what they wait for has come. A busy machine needs longer than a quiet one, but never for ever.
NARROW_SECONDS, PATIENCE_SECONDS = 30.0, 240.0
COUNTED_SECONDS = 1.0
"""After its end a transfer's bytes are on a metrics page within this time."""
THRESHOLD_QUERY = "max(prfaas_gateway_threshold_tokens)"
UTILISATION_QUERY = "max(prfaas_scheduler_link_utilisation_percent)"
SENT_BYTES_QUERY = f"sum(prfaas_transfer_sent_bytes_total{{cluster='{MEMBER}'}})"
RECEIVED_BYTES = f"prfaas_transfer_received_bytes_total{{cluster='{HUB}'}}"


async def run(display: DemoDisplay, *, state: Path, keep: bool, file: ExampleFile) -> None:
    """Run the demo with an example's engine and write `state`/demo.json; with `keep` go on until cancelled.

    Raises PrfaasError if the system does not start; later problems are in the results.
    """
    started, results = time.monotonic(), display.results
    results.engine = file.engine

    def report(text: str) -> None:
        display.line(f"  {text}")

    display.step("Starting two clusters joined by a shaped link")
    async with Sandbox.start(state / "sandbox", link_mbps=WIDE_MBPS, report=report) as sandbox:
        results.startup_seconds["clusters"] = round(time.monotonic() - started, 1)
        installation = await ExampleInstallation.create(sandbox, report=report, file=file)
        results.startup_seconds["all"] = round(time.monotonic() - started, 1)
        await _play(installation, display)
        results.total_seconds = round(time.monotonic() - started, 1)
        results.problems = find_problems(results)
        path = state / "demo.json"
        path.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=2) + b"\n")
        for text in summary(results):
            display.line(text)
        display.line(f"  report      {path}")
        if keep:
            display.line(installation.next_commands("Still running. Ctrl-C stops everything. In another terminal:"))
            await asyncio.Event().wait()
        display.line("  stopping everything")


async def _play(installation: ExampleInstallation, display: DemoDisplay) -> None:
    """Run the steps while the sampler reads the threshold."""

    def on_sample(sample: ThresholdSample) -> None:
        display.results.threshold.append(sample)
        display.sample(sample)

    client = DemoClient(installation.gateway_url, installation.file.model)
    sampler = ThresholdSampler(installation.environment.prometheus_url, on_sample)
    try:
        with display.live():
            async with sampler.running():
                await DemoSteps(installation, client, sampler, display).play()
                display.results.crossed_bytes = sampler.crossed_bytes
    finally:
        await client.close()


class DemoSteps:
    """Runs the steps one after the other."""

    def __init__(
        self, installation: ExampleInstallation, client: DemoClient, sampler: "ThresholdSampler", display: DemoDisplay
    ):
        self._installation = installation
        self._environment = installation.environment
        self._client = client
        self._sampler = sampler
        self._results = display.results
        self._display = display
        self._logs = PodLogs(installation)
        self._ended_at = time.time()  # The last request; by Prometheus's clock.
        self._starts = itertools.count(1, 31_337)  # every prompt another text, the same ones in every run

    async def play(self) -> None:
        await self._shape(WIDE_MBPS)
        await self.lengths()
        await self.narrow_and_widen()
        await self.drill()
        if self._installation.file.engine == "vllm":
            await self.drill_stream()

    async def _shape(self, mbps: int) -> None:
        await self._environment.shape_link(mbps)
        self._sampler.link_mbps = mbps

    async def _ask(self, tokens: int, act: str, *, max_tokens: int = 24, offload: str = "auto") -> RequestRecord:
        prompt = text_of(tokens, start=next(self._starts))
        record = await self._client.ask(prompt, act=act, max_tokens=max_tokens, offload=offload)
        if record.decision == "offload" and not record.kv_bytes and (crossed := await self._logs.transfer(record)):
            record.kv_bytes = crossed.payload_bytes
        return self._note(record)

    def _note(self, record: RequestRecord) -> RequestRecord:
        self._ended_at = time.time()
        self._results.requests.append(record)
        self._display.request(record)
        return record

    async def lengths(self, lengths: Sequence[int] = LENGTHS) -> None:
        self._display.step(f"Prompts of {lengths[0]} to {lengths[-1]:,} tokens over a link of {WIDE_MBPS} Mbit/s")
        for tokens in lengths:
            await self._ask(tokens, "lengths")

    @contextlib.asynccontextmanager
    async def _load(self, tokens: int) -> AsyncIterator[None]:
        """Run a few clients with long prompts while the block runs; wait for their last requests."""
        done = asyncio.Event()

        async def one_client() -> None:
            while not done.is_set():
                await self._ask(tokens, "narrow", max_tokens=4)

        async with asyncio.TaskGroup() as group:
            for _ in range(LOAD_CLIENTS):
                group.create_task(one_client())
            try:
                yield
            finally:
                done.set()

    async def narrow_and_widen(self) -> None:
        results, sampler = self._results, self._sampler
        results.threshold_before_narrowing = before = sampler.samples[-1].tokens if sampler.samples else 0
        first, tokens = len(sampler.samples), load_tokens(before)
        rates = list(narrower(MOST_NARROW_MBPS))
        self._display.step(
            f"The link narrows to {rates[0]} Mbit/s while {LOAD_CLIENTS} clients send {tokens:,}-token prompts"
        )
        async with self._load(tokens):
            for mbps in rates:
                if mbps != rates[0]:
                    self._display.line(f"  this machine's caches do not fill it, so it narrows to {mbps} Mbit/s")
                await self._shape(mbps)
                limit = PATIENCE_SECONDS if mbps == rates[-1] else NARROW_SECONDS
                if await sampler.until(lambda tokens: tokens >= 2 * before, timeout_seconds=limit) >= 2 * before:
                    break
        self._display.step(f"The link widens to {WIDE_MBPS} Mbit/s again")
        await self._shape(WIDE_MBPS)
        results.threshold_narrow_peak = peak = max((s.tokens for s in sampler.samples[first:]), default=0)
        results.threshold_after_widening = await sampler.until(
            lambda tokens: tokens <= peak / 2, timeout_seconds=PATIENCE_SECONDS
        )

    async def drill(self) -> None:
        """Kill the prefill worker in the middle of a transfer; choose a longer one if that was over too soon."""
        for choice in KILL_CHOICES:
            drill = self._results.failure_drill = await self._drill(choice)
            if not drill.asks_for_another:
                return
            self._display.line("  the transfer was not in the middle, so a longer one follows")

    async def _drill(self, choice: DrillChoice) -> FailureDrill:
        """Return the results of one transfer, and of the kill if there was a moment for it."""
        self._display.step(
            f"The cache of {choice.tokens:,} tokens crosses at {choice.mbps} Mbit/s; its prefill worker is killed"
        )
        pod = await self._installation.ready_pod(OFFLOAD_POOL)  # known before, so that the kill takes no time
        before = await self._received_bytes()
        await self._shape(choice.mbps)
        whole = cache_bytes(self._results.requests, choice.tokens)
        request = asyncio.create_task(self._ask(choice.tokens, KILLED, offload="always"))
        moment = "wait"
        while moment == "wait":
            await asyncio.sleep(0.1)
            arrived = await self._sampler.query(f"sum({RECEIVED_BYTES})") or before
            moment = kill_moment(arrived - before, whole, is_answered=request.done())
        if moment == "now":
            await self._environment.kill_pod(self._environment.member, self._installation.namespace, pod)
            self._display.line(f"  killed {pod}")
        killed_at, deadline = time.monotonic(), Deadline(self._installation.file.recovery_seconds)
        await self._shape(WIDE_MBPS)
        record = await request
        transfer = await self._logs.transfer(record)
        if moment == "late":
            return FailureDrill(request=record, transfer=transfer)
        after = await self._until_offloaded_again(AGAIN_TOKENS, deadline)
        return FailureDrill(
            request=record,
            transfer=transfer,
            killed_pod=pod,
            recovered_seconds=round(time.monotonic() - killed_at - after.total_seconds, 2),
            request_after_recovery=after,
        )

    async def _received_bytes(self) -> float:
        """Return the bytes of cache that the hub's instances have received, all former requests' included."""
        deadline = Deadline(PATIENCE_SECONDS)
        while not deadline.is_over:
            read_at = await self._sampler.query(f"min(timestamp({RECEIVED_BYTES}))")
            if read_at is not None and read_at > self._ended_at + COUNTED_SECONDS:
                break
            await asyncio.sleep(0.1)
        return await self._sampler.query(f"sum({RECEIVED_BYTES})") or 0.0

    async def drill_stream(self) -> None:
        """Kill the instance that decodes an answer; choose a longer answer if the gateway had all of it before."""
        for tokens in STREAM_CHOICES:
            drill = self._results.stream_drill = await self._drill_stream(tokens)
            if not drill.asks_for_another:
                return
            self._display.line("  the gateway had the whole answer before, so a longer one is asked for")
            await self._until_restarted(drill.killed_pod)

    async def _drill_stream(self, tokens: int) -> StreamDrill:
        """Return the results of one kill, and the same answer undisturbed."""
        self._display.step(f"A decode instance is killed in the middle of a stream of {tokens:,} tokens")
        prompt, events = text_of(STREAM_PROMPT_TOKENS, start=next(self._starts)), 0
        midway: asyncio.Future[str] = asyncio.get_running_loop().create_future()

        def on_text(instance: str, count: int) -> None:
            nonlocal events
            events = count
            if count >= STREAM_EVENTS and not midway.done():
                midway.set_result(instance)

        async def ask(act: str, on_text: Callable[[str, int], None] | None = None) -> RequestRecord:
            return self._note(await self._client.ask(prompt, act=act, max_tokens=tokens, on_text=on_text))

        undisturbed = await ask("undisturbed")
        request = asyncio.create_task(ask("killed", on_text))
        await asyncio.wait({request, midway}, return_when=asyncio.FIRST_COMPLETED)
        pod, events_before_kill = midway.result() if midway.done() else "", events
        if pod:
            await self._environment.kill_pod(self._environment.hub, self._installation.namespace, pod)
            self._display.line(f"  killed {pod}")
        record = await request
        return StreamDrill(
            undisturbed=undisturbed,
            request=record,
            killed_pod=pod,
            events_before_kill=events_before_kill,
            outcome=await self._logs.outcome(record),
        )

    async def _until_restarted(self, pod: str) -> None:
        """Wait for a killed decode instance: the next answer needs two."""
        deadline = Deadline(self._installation.file.recovery_seconds)
        while pod and not deadline.is_over:
            if await self._installation.has_restarted(pod):
                return
            await asyncio.sleep(1.0)

    async def _until_offloaded_again(self, tokens: int, deadline: Deadline) -> RequestRecord:
        """Send prompts until one is offloaded: the gateway ejects a failed worker for a moment."""
        await self._installation.wait_ready("prefillpool", OFFLOAD_POOL, timeout_seconds=deadline.left_seconds)
        while True:
            record = await self._ask(tokens, "again", offload="always")
            if record.prefilled_in == self._installation.member_name or deadline.is_over:
                return record
            await asyncio.sleep(1.0)


class ThresholdSampler:
    """Samples of the threshold since the start, each given to `on_sample`; and the bytes that crossed the link."""

    def __init__(self, prometheus_url: str, on_sample: Callable[[ThresholdSample], None]):
        self.samples: list[ThresholdSample] = []
        self.link_mbps = 0
        self.crossed_bytes = 0
        self._sent = 0.0
        self._on_sample = on_sample
        self._started = time.monotonic()
        self._http = httpx.AsyncClient(base_url=prometheus_url, timeout=2.0, trust_env=False)  # no proxy

    async def query(self, promql: str) -> float | None:
        """Return the one value of an instant query, or None if there is none (yet)."""
        try:
            answer = await self._http.get("/api/v1/query", params={"query": promql})
            results = answer.raise_for_status().json()["data"]["result"]
        except httpx.HTTPError:
            return None
        return float(results[0]["value"][1]) if results else None

    async def _sample(self) -> None:
        threshold, utilisation, sent = await asyncio.gather(
            self.query(THRESHOLD_QUERY), self.query(UTILISATION_QUERY), self.query(SENT_BYTES_QUERY)
        )
        if sent is not None:  # it is missing while an instance does not answer
            self.crossed_bytes += int(sent - self._sent if sent >= self._sent else sent)  # a new one begins at 0
            self._sent = sent
        if threshold is None:
            return
        sample = ThresholdSample(
            seconds=round(time.monotonic() - self._started, 2),
            tokens=int(threshold),
            link_mbps=self.link_mbps,
            utilisation_percent=utilisation,
        )
        self.samples.append(sample)
        self._on_sample(sample)

    async def _run(self) -> None:
        while True:
            await self._sample()
            await asyncio.sleep(1.0)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator["ThresholdSampler"]:
        """Sample in the background while the block runs."""
        task = asyncio.create_task(self._run())
        try:
            yield self
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            await self._http.aclose()

    async def until(self, holds: Callable[[int], bool], *, timeout_seconds: float) -> int:
        """Return the first new threshold that satisfies `holds`, or the last one when time is up."""
        deadline, seen = Deadline(timeout_seconds), len(self.samples)
        while not deadline.is_over:
            for sample in self.samples[seen:]:
                if holds(sample.tokens):
                    return sample.tokens
            await asyncio.sleep(0.2)
        return self.samples[-1].tokens if self.samples else 0
