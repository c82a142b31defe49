"""Serves GET /metrics of a mover. The first rank's answer holds the figures of all ranks of the instance.

Prometheus scrapes one port a pod. So the other ranks listen on the loopback address alone, at the ports behind it, and
the first one asks them at every scrape. Each figure has its rank as a label.
"""

import logging
import threading
import urllib.request
from collections.abc import Callable, Iterable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from prfaas.errors import ConfigError
from prfaas.ports import url_host
from prfaas.wire.engine import Stats
from prfaas.wire.transfer import LayerGroup
from prfaas_transfer.metrics import PROFILE_TOKENS, Labelled, TransferMetrics, cache_sizes, transfer_totals
from prfaas_transfer.mover.messages import MoverOptions

log = logging.getLogger(__name__)

RANK_SECONDS: Final = 2.0
REQUEST_SECONDS: Final = 5.0
"""A peer that says nothing for this long is gone."""
MAX_SCRAPES: Final = 16
"""Connections at a time: each costs a thread and a descriptor of the process that carries the caches."""
LOOPBACK: Final = "127.0.0.1"


class MoverMetrics(Collector):
    """The figures of one mover; `stats` returns the present ones."""

    def __init__(self, options: MoverOptions, stats: Callable[[], Stats]):
        self.transfers = TransferMetrics()
        self._labels = Labelled(rank=str(options.mover))
        self._sizes = {tokens: cache_bytes(options, tokens) for tokens in PROFILE_TOKENS}
        self._stats = stats
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def collect(self) -> Iterable[Metric]:
        yield from self.transfers.collect(self._labels)
        yield from transfer_totals(self._labels, self._stats())
        yield cache_sizes(self._labels, self._sizes)

    def render(self) -> str:
        return generate_latest(self._registry).decode()


def cache_bytes(options: MoverOptions, tokens: int) -> int:
    """Return what the cache of a prompt of so many tokens brings over a link, from all ranks together."""
    sizes = [_group_bytes(group, tokens) for group in options.groups]
    copies = options.copies or (1,) * len(sizes)
    # `held` ranks have the same bytes, which cross once.
    return sum(options.ranks * size // held for size, held in zip(sizes, copies, strict=True))


def _group_bytes(group: LayerGroup, tokens: int) -> int:
    rows = tokens / group.row_tokens if group.kind == "attention" else 1
    return round(rows * group.nbytes * len(group.layers))


class _Server(ThreadingHTTPServer):
    """A server with a bound: what comes beyond it is closed at once."""

    daemon_threads = True

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]):
        self._free = threading.BoundedSemaphore(MAX_SCRAPES)
        super().__init__(address, handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._free.acquire(blocking=False):
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()


def serve(host: str, port: int, metrics: MoverMetrics, other_ports: Iterable[int] = ()) -> None:
    """Serve on a thread; `other_ports` are those of the other ranks. Raises ConfigError if the port is not
    available."""
    others = tuple(other_ports)

    class Handler(BaseHTTPRequestHandler):
        timeout = REQUEST_SECONDS

        def do_GET(self) -> None:  # the base class calls it
            if self.path.partition("?")[0] != "/metrics":
                self.send_error(404)
                return
            body = merged([metrics.render(), *_scrape(others)]).encode()
            self.send_response(200)
            self.send_header("content-type", CONTENT_TYPE_PLAIN_0_0_4)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002  # the base class names it
            log.debug(format, *args)

    try:
        server = _Server((host, port), Handler)
    except OSError as error:
        raise ConfigError(f"metrics port {url_host(host)}:{port} cannot be opened: {error.strerror}") from error
    threading.Thread(target=server.serve_forever, name="metrics", daemon=True).start()


def merged(texts: Iterable[str]) -> str:
    """Join expositions: the samples of a family stand together."""
    families: dict[str, Metric] = {}
    for text in texts:
        for family in text_string_to_metric_families(text):
            families.setdefault(family.name, family).samples.extend(
                family.samples if family is not families[family.name] else []
            )
    registry = CollectorRegistry()
    registry.register(_Families(families.values()))
    return generate_latest(registry).decode()


class _Families(Collector):
    def __init__(self, families: Iterable[Metric]):
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def _scrape(ports: Iterable[int]) -> Iterable[str]:
    for port in ports:
        try:
            with urllib.request.urlopen(f"http://{LOOPBACK}:{port}/metrics", timeout=RANK_SECONDS) as answer:
                yield answer.read().decode()
        except OSError as error:
            log.warning("the figures of the rank at port %d are missing: %s", port, error)
