"""Two clusters of vLLM with our connector, as Prometheus sees them: real metric texts, and a link that carries so much.

The texts are those of a running vLLM 0.32.0 server (vllm-0.32.0.metrics.txt); only values are replaced. The plant is a
fluid: so many prompts a second of these lengths, the part above the threshold in force crosses the link, and what the
link cannot carry waits. So the right threshold is known exactly.
"""

import asyncio
import contextlib
import math
import re
import time
from bisect import bisect
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from operator import sub
from pathlib import Path

import msgspec
from aiohttp import web

from prfaas.routing.lengths import BINS, EDGES, DemandAbove, demand_of
from prfaas.wire.control import Counters
from prfaas.wire.profile import PoolProfile, Profile
from prfaas.wire.routes import Cluster, Instance

from .conftest import FakeGateway, exporting, prometheus_binary, scraping

TEXT = (Path(__file__).parent / "vllm-0.32.0.metrics.txt").read_text()
SCRAPE_SECONDS = 1
PROFILE = Profile(
    state_bytes=500_000, token_bytes=600, fixed_seconds=0.01, token_seconds=5e-6, samples=3, max_tokens=131_072
)
ARRIVALS_PER_SECOND = 40.0
ANSWER_TOKENS, STEP_SECONDS = 100.0, 0.02


def _lognormal(mu: float, sigma: float) -> list[float]:
    """Return the shares of the prompts in the bins of lengths."""

    def below(tokens: float) -> float:
        return 0.5 * (1 + math.erf((math.log(tokens) - mu) / sigma / math.sqrt(2))) if tokens > 0 else 0.0

    return [below(high) - below(low) for low, high in pairwise(EDGES)]


SHARES = _lognormal(8.0, 1.0)
DEMAND = demand_of(BINS, SHARES)
CUMULATED = list(accumulate(SHARES))
GOLDEN = 0.6180339887498949


def offered_mbps(threshold_tokens: float) -> float:
    """Return what crosses the link with this threshold."""
    return ARRIVALS_PER_SECOND * DEMAND.above(threshold_tokens).bits(PROFILE) / 1e6


def bearable_tokens(mbps: float) -> float:
    """Return the lowest threshold whose traffic the link can carry."""
    low, high = 0.0, 1e6
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if offered_mbps(middle) > mbps else (low, middle)
    return high


def exposition(values: Mapping[str, float]) -> str:
    """Return vLLM's own text with these values; a key is a series' name, with or without its labels."""
    lines = []
    for line in TEXT.splitlines():
        series, _, _ = line.rpartition(" ")
        value = values.get(series, values.get(re.split(r"[{]", series)[0]))
        lines.append(line if line.startswith("#") or value is None else f"{series} {value}")
    return "\n".join(lines) + "\n"


@dataclass
class Plant:
    """The link, the pods on both sides, and the gateway whose threshold divides the prompts."""

    gateway: FakeGateway
    link_mbps: float = 1000.0
    local_waiting: int = 0
    silent: set[str] = field(default_factory=set)
    unsent_bytes: float = 0.0
    sent_bytes: float = 0.0
    backlogged_bytes: float = 0.0
    backlogged_seconds: float = 0.0
    seconds: float = 0.0
    shown_waiting_after: int | None = None
    """Updates of the threshold before a scrape first showed that data waits since the link changed; None: none did."""
    _prompts: dict[str, list[float]] = field(default_factory=lambda: {"offload": [0.0] * 3, "local": [0.0] * 3})
    _since: float = field(default_factory=time.monotonic)

    def set_link(self, mbps: float) -> None:
        self.advance()
        self.link_mbps, self.shown_waiting_after = mbps, None

    @property
    def threshold_tokens(self) -> float:
        updates = self.gateway.updates
        return updates[-1].tokens if updates and updates[-1].offload_clusters else math.inf

    def advance(self) -> None:
        """Let the fluid flow until now, in steps of 10 ms."""
        now = time.monotonic()
        while self._since < now:
            step = min(0.01, now - self._since)
            self._flow(step)
            self._since += step

    def _flow(self, seconds: float) -> None:
        self.seconds += seconds
        threshold = self.threshold_tokens
        above = DEMAND.above(threshold) if math.isfinite(threshold) else DEMAND.above(1e9)
        come = ARRIVALS_PER_SECOND * seconds
        self.unsent_bytes += come * above.bits(PROFILE) / 8
        carried = min(self.unsent_bytes, self.link_mbps * 1e6 / 8 * seconds)
        self.unsent_bytes -= carried
        self.sent_bytes += carried
        if self.unsent_bytes > 1.0:
            self.backlogged_bytes += carried
            self.backlogged_seconds += seconds
        everything = DEMAND.above(0.0)
        for pool, part in (("offload", above), ("local", DemandAbove(*map(sub, everything, above)))):
            counted = self._prompts[pool]
            for place, more in enumerate((part.share, part.seconds(PROFILE), part.tokens)):
                counted[place] += come * more
        self.gateway.offloaded = int(self._prompts["offload"][0])
        self.gateway.local = int(self._prompts["local"][0])

    def text(self, key: str) -> str:
        """Return what one port of one pod answers; `key` is cluster/pool/pod/port."""
        self.advance()
        _, pool, _, port = key.split("/")
        if pool == "node":
            return f'node_network_transmit_bytes_total{{device="wan0"}} {self.sent_bytes}\n'
        if port == "8002":
            return self._connector(pool)
        if pool == "decode":
            return self._decode()
        count, busy, tokens = self._prompts[pool]
        waiting = self.local_waiting if pool == "local" else 0
        return exposition(
            {
                "vllm:request_prefill_time_seconds_count": count,
                "vllm:request_prefill_time_seconds_sum": busy,
                "vllm:request_prefill_kv_computed_tokens_sum": tokens,
                "vllm:request_prompt_tokens_sum": tokens,
                'vllm:num_requests_waiting_by_reason{engine="0",model_name="tiny",reason="capacity"}': waiting,
                'vllm:num_requests_waiting_by_reason{engine="0",model_name="tiny",reason="deferred"}': 50,
            }
        )

    def _decode(self) -> str:
        answers = ARRIVALS_PER_SECOND * self.seconds
        steps = answers * ANSWER_TOKENS
        return exposition(
            {
                "vllm:num_requests_running": ARRIVALS_PER_SECOND * ANSWER_TOKENS * STEP_SECONDS,
                "vllm:kv_cache_usage_perc": 0.4,
                "vllm:generation_tokens_total": steps,
                'vllm:request_success_total{engine="0",finished_reason="length",model_name="tiny"}': answers,
                "vllm:inter_token_latency_seconds_sum": steps * STEP_SECONDS,
                "vllm:inter_token_latency_seconds_count": steps,
            }
        )

    def _connector(self, pool: str) -> str:
        mine = pool == "offload"
        if mine and self.unsent_bytes > 1.0 and self.shown_waiting_after is None:
            self.shown_waiting_after = len(self.gateway.updates)
        values = {
            'prfaas_link_sent_bytes_total{peer="hub"}': self.sent_bytes,
            'prfaas_link_backlogged_bytes_total{peer="hub"}': self.backlogged_bytes,
            'prfaas_link_backlogged_seconds_total{peer="hub"}': self.backlogged_seconds,
            'prfaas_link_unsent_bytes{peer="hub"}': self.unsent_bytes,
            "prfaas_transfer_sent_bytes_total": self.sent_bytes,
        }
        return "".join(f"{name} {value if mine else 0.0}\n" for name, value in values.items())


@dataclass
class CountingGateway(FakeGateway):
    """A gateway that counts lengths; it gets its plant before the first request."""

    plant: Plant | None = None
    _counts: list[int] = field(default_factory=lambda: [0] * len(SHARES))

    def _lengths(self) -> tuple[int, ...]:
        """Return the prompts so far by bin: the n-th one has the quantile n * golden ratio, so that all are visited."""
        for number in range(sum(self._counts), int(ARRIVALS_PER_SECOND * self.plant.seconds)):
            self._counts[min(bisect(CUMULATED, number * GOLDEN % 1.0), len(SHARES) - 1)] += 1
        return tuple(self._counts)

    async def get_counters(self, _: web.Request) -> web.Response:
        self.plant.advance()
        counters = Counters(offloaded=self.offloaded, local=self.local, failed_offloads=0, lengths=self._lengths())
        return web.Response(body=msgspec.json.encode(counters), content_type="application/json")


PODS = (("eu", "offload", "prefill"), ("hub", "local", "prefill"), ("hub", "decode", "decode"))


def instances(engine: str) -> tuple[Instance, ...]:
    return tuple(
        Instance(name=f"{pool}-{n}", pool=pool, cluster=cluster, role=role, url="http://192.0.2.1:8000", engine=engine)
        for cluster, pool, role in PODS
        for n in range(4)
    )


def clusters(**changed: object) -> tuple[Cluster, ...]:
    query = 'sum(rate(prfaas_link_sent_bytes_total{cluster="$cluster",peer=~"hub|"}[5s])) * 8 / 1e6'
    return (Cluster(**{"name": "eu", "capacity_mbps": 1000, "utilisation_query": query, **changed}),)


def seeds() -> tuple[PoolProfile, ...]:
    """What the specs of both prefill pools say: sizes are right, times twice too long."""
    slow = msgspec.structs.replace(
        PROFILE, fixed_seconds=2 * PROFILE.fixed_seconds, token_seconds=2 * PROFILE.token_seconds
    )
    pools = (("eu", "offload"), ("hub", "local"))
    return tuple(PoolProfile(cluster=cluster, pool=pool, profile=slow) for cluster, pool in pools)


def _configuration(port: int, keys: list[str]) -> str:
    """Return what the PodMonitors of the charts come to: one job, and the labels that queries select by."""
    targets = []
    for key in keys:
        cluster, pool, pod, api = key.split("/")
        role = "decode" if pool == "decode" else "prefill"
        labels = f"cluster: {cluster}, pool: {pool}, role: {role}, pod: {pod}, instance: '{pod}:{api}'"
        targets.append(f"      - {{targets: ['127.0.0.1:{port}'], labels: {{__metrics_path__: /{key}, {labels}}}}}")
    return (
        f"global: {{scrape_interval: {SCRAPE_SECONDS}s, scrape_timeout: {SCRAPE_SECONDS}s}}\n"
        "scrape_configs:\n  - job_name: vllm\n    static_configs:\n" + "\n".join(targets) + "\n"
    )


@contextlib.asynccontextmanager
async def scraped(text: Callable[[str], str | None], keys: list[str], folder: Path) -> AsyncIterator[str]:
    """Serve these texts and let a real Prometheus scrape them; yields its address."""
    async with exporting(text) as port, scraping(prometheus_binary(), folder, _configuration(port, keys)) as url:
        await asyncio.sleep(0)
        yield url
