"""The scheduler's surroundings, as real as one machine allows: a control socket, workers to scrape, and a Prometheus.

The workers' counters are functions of time, so that a rate over any window has one right answer.
"""

import asyncio
import contextlib
import shutil
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import msgspec
import pytest
import pytest_asyncio
from aiohttp import web
from tests import tables
from tests.serving import serving
from tests.waiting import eventually_async

from prfaas.api.membercluster import DEFAULT_UTILISATION_QUERY
from prfaas.ports import free_ports
from prfaas.wire.control import Counters, ThresholdUpdate
from prfaas.wire.routes import Cluster, Instance, RoutingTable, Threshold
from prfaas_sandbox.cache.entries import cache_folder

SCRAPE_MILLIS = 500


def make_table(**changes) -> RoutingTable:
    """A policy with one offload pool of two instances in `eu` and one decode instance in the hub."""
    eu = Cluster(name="eu", capacity_mbps=100, utilisation_query=DEFAULT_UTILISATION_QUERY)
    instances = tuple(
        Instance(name=f"eu-{n}", pool="offload", cluster="eu", role="prefill", url="http://192.0.2.1:8000")
        for n in range(2)
    )
    decode = Instance(name="hub-0", pool="decode", cluster="hub", role="decode", url="http://192.0.2.2:8000")
    values = {
        "policy": "kimi",
        "namespace": "prfaas",
        "generation": 3,
        "threshold": Threshold(mode="Auto", tokens=1024, min_tokens=512, max_tokens=32768),
        "clusters": (eu,),
        "instances": (*instances, decode),
    }
    return tables.make_table(**(values | changes))


@pytest.fixture
def table() -> Callable[..., RoutingTable]:
    return make_table


@dataclass
class FakeGateway:
    """The gateway's end of the control socket."""

    path: Path
    table: RoutingTable | None = field(default_factory=make_table)
    offloaded: int = 0
    local: int = 0
    updates: list[ThresholdUpdate] = field(default_factory=list)
    pushed: asyncio.Event = field(default_factory=asyncio.Event)

    async def get_table(self, _: web.Request) -> web.Response:
        if self.table is None:
            return web.Response(status=503, text="no routing table yet")
        return web.Response(body=msgspec.json.encode(self.table), content_type="application/json")

    async def get_counters(self, _: web.Request) -> web.Response:
        counters = Counters(offloaded=self.offloaded, local=self.local, failed_offloads=0)
        return web.Response(body=msgspec.json.encode(counters), content_type="application/json")

    async def put_threshold(self, request: web.Request) -> web.Response:
        self.updates.append(msgspec.json.decode(await request.read(), type=ThresholdUpdate))
        self.pushed.set()
        return web.Response(status=204)

    @contextlib.asynccontextmanager
    async def listening(self) -> AsyncIterator["FakeGateway"]:
        app = web.Application()
        app.router.add_get("/table", self.get_table)
        app.router.add_get("/counters", self.get_counters)
        app.router.add_put("/threshold", self.put_threshold)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.UnixSite(runner, str(self.path)).start()
        try:
            yield self
        finally:
            await runner.cleanup()
            self.path.unlink(missing_ok=True)


@pytest.fixture
def gateway(tmp_path: Path) -> FakeGateway:
    return FakeGateway(tmp_path / "control.sock")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


@dataclass
class Worker:
    """A worker's counters, moving at settable rates."""

    mbps: float = 0.0
    backlogged_share: float = 0.0
    unsent_bytes: int = 0
    waiting: int = 0
    answers: bool = True
    mismatch: str = ""
    mismatched_at: float = 0.0
    _bytes: float = 0.0
    _backlogged_bytes: float = 0.0
    _backlogged_seconds: float = 0.0
    _since: float = field(default_factory=time.monotonic)

    def move(self, mbps: float, backlogged_share: float) -> None:
        """From now on send at this rate; everything sent had to wait for the link when the share is not zero."""
        self._advance()
        self.mbps, self.backlogged_share = mbps, backlogged_share

    def _advance(self) -> None:
        now = time.monotonic()
        seconds, self._since = now - self._since, now
        self._bytes += seconds * self.mbps * 1e6 / 8
        if self.backlogged_share:
            self._backlogged_bytes += seconds * self.mbps * 1e6 / 8
            self._backlogged_seconds += seconds * self.backlogged_share

    def _links(self) -> str:
        """Half to the hub by name, half to where it has none, all at the same time; and much to the own cluster."""
        whole = {"sent_bytes_total": self._bytes, "backlogged_bytes_total": self._backlogged_bytes}
        lines = [
            f'prfaas_link_{name}{{peer="{peer}"}} {value / 2}' for name, value in whole.items() for peer in ("", "hub")
        ]
        lines += [
            f'prfaas_link_backlogged_seconds_total{{peer="hub"}} {self._backlogged_seconds}',
            'prfaas_link_backlogged_seconds_total{peer=""} 0',
            f'prfaas_link_unsent_bytes{{peer="hub"}} {self.unsent_bytes}',
            'prfaas_link_unsent_bytes{peer="eu"} 5e9',
        ]
        inside = ("sent_bytes_total", "backlogged_bytes_total", "backlogged_seconds_total")
        lines += [f'prfaas_link_{name}{{peer="eu"}} {1e9 * time.monotonic()}' for name in inside]
        return "".join(f"{line}\n" for line in lines)

    def exposition(self) -> str:
        self._advance()
        sent = f"prfaas_transfer_sent_bytes_total {self._bytes}\n"
        waiting = f"prfaas_prefills_waiting {self.waiting}\n"
        labels = f'{{reason="{self.mismatch}"}}'
        refused = f"prfaas_transfer_mismatch_timestamp_seconds{labels} {self.mismatched_at}\n" if self.mismatch else ""
        return f"{sent}{self._links()}{_decoding()}{waiting}{refused}"


def _decoding() -> str:
    """What an instance does that finishes 8 answers of 75 tokens in 10 s, in steps of 30 ms, and drops 9 more."""
    seconds = time.monotonic()
    finished = {"stop": 0.5, "length": 0.3, "abort": 0.9}
    lines = [f'prfaas_answers_total{{reason="{why}"}} {rate * seconds}' for why, rate in finished.items()]
    lines += [
        f"prfaas_generation_tokens_total {60 * seconds}",
        f"prfaas_decode_seconds_total {0.6 * seconds}",
        f"prfaas_decode_steps_total {20 * seconds}",
        "prfaas_requests_running_limit 8",
    ]
    return "".join(f"{line}\n" for line in lines)


@dataclass
class Site:
    """Workers that a Prometheus scrapes; keys are `cluster/pool/pod`."""

    workers: dict[str, Worker]
    prometheus_url: str


def prometheus_binary() -> Path | None:
    """The binary that the sandbox built, or one on PATH; nothing is built here."""
    built = sorted(cache_folder().glob("bin-prometheus-*/prometheus"))
    found = shutil.which("prometheus")
    return built[-1] if built else Path(found) if found else None


def _configuration(port: int, workers: dict[str, Worker]) -> str:
    targets = []
    for key in workers:
        cluster, pool, pod = key.split("/")
        labels = f"{{__metrics_path__: /{key}, cluster: {cluster}, pool: {pool}, pod: {pod}}}"
        targets.append(f"      - {{targets: ['127.0.0.1:{port}'], labels: {labels}}}")
    return (
        f"global: {{scrape_interval: {SCRAPE_MILLIS}ms, scrape_timeout: {SCRAPE_MILLIS}ms}}\n"
        "scrape_configs:\n  - job_name: workers\n    static_configs:\n" + "\n".join(targets) + "\n"
    )


@contextlib.asynccontextmanager
async def exporting(text: Callable[[str], str | None]) -> AsyncIterator[int]:
    """Serve what `text` returns for a path, at a port of loopback; a path without a text is unavailable."""

    async def expose(request: web.Request) -> web.Response:
        found = text(request.path.strip("/"))
        if found is None:
            return web.Response(status=503)
        return web.Response(text=found, headers={"Content-Type": "text/plain; version=0.0.4"})

    async with serving(expose) as url:
        yield int(url.rpartition(":")[2])


@contextlib.asynccontextmanager
async def scraping(binary: Path, folder: Path, configuration: str) -> AsyncIterator[str]:
    (folder / "prometheus.yml").write_text(configuration)
    (port,) = free_ports(1)
    with (folder / "prometheus.log").open("w") as log:
        process = await asyncio.create_subprocess_exec(
            str(binary),
            f"--config.file={folder}/prometheus.yml",
            f"--storage.tsdb.path={folder}/data",
            f"--web.listen-address=127.0.0.1:{port}",
            stdout=log,
            stderr=log,
        )
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            await asyncio.wait_for(process.wait(), 20)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def site(tmp_path_factory: pytest.TempPathFactory, http: aiohttp.ClientSession) -> AsyncIterator[Site]:
    """Workers in eu, one of another policy's pool, one in the hub; a real Prometheus scrapes them (after 5 s)."""
    binary = prometheus_binary()
    if binary is None:
        pytest.skip("no Prometheus: run `make tools` first")
    keys = ("eu/offload/eu-0", "eu/offload/eu-1", "hub/decode/hub-0", "eu/of-another-policy/eu-2")
    workers = {key: Worker() for key in keys}
    folder = tmp_path_factory.mktemp("prometheus")

    def text(key: str) -> str | None:
        return workers[key].exposition() if workers[key].answers else None

    async with exporting(text) as port, scraping(binary, folder, _configuration(port, workers)) as url:

        async def is_scraping() -> bool:
            with contextlib.suppress(aiohttp.ClientError, KeyError):
                form = {"query": "count(prfaas_transfer_sent_bytes_total)"}
                async with http.post(f"{url}/api/v1/query", data=form) as response:
                    result = (await response.json())["data"]["result"]
                    return bool(result) and result[0]["value"][1] == str(len(keys))
            return False

        log = folder / "prometheus.log"
        await eventually_async(is_scraping, lambda: f"Prometheus scrapes: {log.read_text()[-2000:]}", poll=0.1)
        yield Site(workers, url)
