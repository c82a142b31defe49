"""The acts of the demo, in order: lengths, a link that narrows, a link that widens, a worker that dies mid-transfer.

Each act drives the running system from outside only (HTTP to the gateway, tc on the link, a signal to a process) and
writes what it saw into the story; nothing here knows how the system decides.
"""

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator

from prfaas_sandbox.demo.client import Client
from prfaas_sandbox.demo.install import OFFLOAD_POOL, Installation
from prfaas_sandbox.demo.records import FailureDrill, RequestRecord, Story
from prfaas_sandbox.demo.show import Show
from prfaas_sandbox.demo.texts import text_of
from prfaas_sandbox.demo.watch import SENT_BYTES_QUERY, Watch

LENGTHS = (100, 300, 600, 1_200, 2_500, 5_000, 10_000, 16_000)
WIDE_MBPS, NARROW_MBPS, DRILL_MBPS = 100, 5, 4
LOAD_TOKENS, LOAD_CLIENTS = 6_000, 3
DRILL_TOKENS, DRILL_BYTES = 8_000, 250_000  # so much of the cache has left when the worker is killed
NARROW_TIMEOUT_SECONDS, WIDEN_TIMEOUT_SECONDS, RECOVERY_TIMEOUT_SECONDS = 30.0, 40.0, 60.0


class Teller:
    """Tells the acts one after the other.

    Args:
        installation: the running system.
        client: sends the prompts.
        watch: samples the threshold.
        story: where everything seen is written.
        show: what a person sees.

    """

    def __init__(self, installation: Installation, client: Client, watch: Watch, story: Story, show: Show):
        self._installation = installation
        self._place = installation.place
        self._client = client
        self._watch = watch
        self._story = story
        self._show = show
        self._starts = itertools.count(1, 31_337)  # every prompt another text, the same ones in every run

    async def tell(self) -> None:
        """Play all acts."""
        await self._shape(WIDE_MBPS)
        await self._lengths()
        await self._narrow_and_widen()
        await self._drill()

    async def _shape(self, mbps: int) -> None:
        await self._place.shape_link(mbps)
        self._watch.link_mbps = mbps

    async def _ask(self, tokens: int, act: str, *, max_tokens: int = 24) -> RequestRecord:
        record = await self._client.ask(text_of(tokens, start=next(self._starts)), act=act, max_tokens=max_tokens)
        self._story.requests.append(record)
        self._show.request(record)
        return record

    async def _lengths(self) -> None:
        self._show.act(f"Prompts of {LENGTHS[0]} to {LENGTHS[-1]:,} tokens over a link of {WIDE_MBPS} Mbit/s")
        for tokens in LENGTHS:
            await self._ask(tokens, "lengths")

    @contextlib.asynccontextmanager
    async def _load(self, act: str) -> AsyncIterator[None]:
        """Keep a few clients sending long prompts while the block runs; their last requests are awaited."""
        done = asyncio.Event()

        async def one_client() -> None:
            while not done.is_set():
                await self._ask(LOAD_TOKENS, act, max_tokens=4)

        async with asyncio.TaskGroup() as group:
            for _ in range(LOAD_CLIENTS):
                group.create_task(one_client())
            try:
                yield
            finally:
                done.set()

    async def _narrow_and_widen(self) -> None:
        story = self._story
        story.threshold_before_narrowing = before = self._watch.samples[-1].tokens if self._watch.samples else 0
        self._show.act(
            f"The link narrows to {NARROW_MBPS} Mbit/s while {LOAD_CLIENTS} clients send {LOAD_TOKENS:,}-token prompts"
        )
        await self._shape(NARROW_MBPS)
        first = len(self._watch.samples)
        async with self._load("narrow"):
            await self._watch.until(lambda tokens: tokens >= 2 * before, timeout_seconds=NARROW_TIMEOUT_SECONDS)
        self._show.act(f"The link widens to {WIDE_MBPS} Mbit/s again")
        await self._shape(WIDE_MBPS)
        story.threshold_narrow_peak = peak = max((s.tokens for s in self._watch.samples[first:]), default=0)
        story.threshold_after_widening = await self._watch.until(
            lambda tokens: tokens <= peak / 2, timeout_seconds=WIDEN_TIMEOUT_SECONDS
        )

    async def _drill(self) -> None:
        tokens = DRILL_TOKENS
        self._show.act(f"The cache of {tokens:,} tokens crosses at {DRILL_MBPS} Mbit/s; its prefill worker is killed")
        await self._shape(DRILL_MBPS)
        query = SENT_BYTES_QUERY.format(cluster=self._installation.member_name)
        before = await self._watch.query(query) or 0.0
        request = asyncio.create_task(self._ask(tokens, "kill"))
        sent = 0.0
        while sent < DRILL_BYTES and not request.done():
            await asyncio.sleep(0.1)
            sent = (await self._watch.query(query) or 0.0) - before
        pod = await self._installation.ready_pod(OFFLOAD_POOL)
        await self._place.kill_pod(self._place.member, self._installation.namespace, pod)
        killed_at = time.monotonic()
        sent_before_kill = 0 if request.done() else int(sent)
        self._show.line(f"  killed {pod}")
        record = await request
        await self._shape(WIDE_MBPS)
        after = await self._until_offloaded_again(tokens, killed_at + RECOVERY_TIMEOUT_SECONDS)
        self._story.failure_drill = FailureDrill(
            request=record,
            killed_pod=pod,
            bytes_sent_before_kill=sent_before_kill,
            recovered_seconds=round(time.monotonic() - killed_at - after.total_seconds, 2),
            request_after_recovery=after,
        )

    async def _until_offloaded_again(self, tokens: int, deadline: float) -> RequestRecord:
        """Send such prompts until one is offloaded: the gateway leaves a worker that failed alone for a moment."""
        await self._installation.wait_ready("prefillpool", OFFLOAD_POOL, timeout_seconds=deadline - time.monotonic())
        while True:
            record = await self._ask(tokens, "again")
            if record.prefilled_in == self._installation.member_name or time.monotonic() > deadline:
                return record
            await asyncio.sleep(1.0)
