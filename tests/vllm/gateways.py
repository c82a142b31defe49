"""Our gateway as a process, before two servers of any engine: one prefills in a member cluster, the other decodes."""

import json
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from prfaas.names import HUB, WORKER_DATA_PORT
from prfaas.ports import free_ports
from prfaas.processes import ChildProcess, tail
from prfaas.wire import headers
from prfaas.wire.routes import Cluster, EngineName, Instance, LinkWatermarks, RoutingTable, Threshold, encode

from ..waiting import eventually
from .connected import CONNECTOR
from .servers import StartServer, VllmServer, answers

MEMBER = "member"
GATEWAY_LOG = "gateway.log"


def table_of(engine: EngineName, prefill_url: str, decode_url: str, data_port: int = WORKER_DATA_PORT) -> RoutingTable:
    """A policy that offloads every prompt; `data_port` is the source's."""
    return RoutingTable(
        policy="p",
        namespace="n",
        generation=1,
        model="tiny",
        on_offload_failure="PrefillLocally",
        threshold=Threshold(mode="Fixed", tokens=1, min_tokens=1, max_tokens=1),
        watermarks=LinkWatermarks(high_percent=80, low_percent=50),
        short_interval_seconds=1,
        clusters=(Cluster(name=MEMBER, capacity_mbps=1000, utilisation_query="vector(0)"),),
        instances=(
            Instance(
                name="source",
                pool="far",
                cluster=MEMBER,
                role="prefill",
                url=prefill_url,
                engine=engine,
                data_port=data_port,
            ),
            Instance(name="destination", pool="decode", cluster=HUB, role="decode", url=decode_url, engine=engine),
        ),
    )


@contextmanager
def gateway(folder: Path, table: RoutingTable) -> Iterator[tuple[str, str]]:
    """Run a gateway with this table; give its URL, and that of its metrics."""
    routes, (port, admin_port) = folder / "routes.json.gz", free_ports(2)
    routes.write_bytes(encode(table))
    command = [sys.executable, "-m", "prfaas_gateway", "--routes-file", routes]
    command += ["--port", str(port), "--admin-port", str(admin_port)]
    child = ChildProcess("the gateway", command, folder / GATEWAY_LOG)
    try:
        url = f"http://127.0.0.1:{port}"

        def is_ready() -> bool:
            child.check_running()
            return answers(f"{url}/readyz")

        eventually(is_ready, lambda: f"the gateway is ready; its log: {tail(child.log)}", poll=0.1)
        yield url, f"http://127.0.0.1:{admin_port}"
    finally:
        child.stop(grace_seconds=2)


def offloaded(url: str, body: dict) -> dict:
    """Send a completion through the gateway; fail if it was not prefilled in the member cluster."""
    data = json.dumps({"model": "tiny"} | body).encode()
    request = urllib.request.Request(f"{url}/v1/completions", data, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=300) as answer:
        assert answer.headers[headers.DECISION] == "offload"
        assert answer.headers[headers.OUTCOME] == "ok"
        return json.load(answer)


class ServerPair(NamedTuple):
    """Two servers of vLLM with our connector, and the gateway before them."""

    source: VllmServer
    destination: VllmServer
    url: str
    log: Path
    """The gateway's."""


@contextmanager
def connected_servers(start_server: StartServer, folder: Path, *flags: str) -> Iterator[ServerPair]:
    """Run two servers with our connector and these flags, behind a gateway that offloads every prompt."""
    ports = free_ports(2)
    servers = [
        start_server("--kv-transfer-config", json.dumps(CONNECTOR | {"kv_port": port}), *flags) for port in ports
    ]
    source, destination = (server.wait_ready() for server in servers)
    with gateway(folder, table_of("vllm-prfaas", source.url, destination.url, ports[0])) as (url, _):
        yield ServerPair(source, destination, url, folder / GATEWAY_LOG)
