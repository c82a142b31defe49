"""Prometheus scrapes every named port of prfaas's pods in both clusters, and labels what it finds."""

import json
import urllib.parse

import aiohttp
import pytest

pytestmark = [pytest.mark.clusters, pytest.mark.asyncio(loop_scope="session")]

SERVE = """
import http.server, os

class Metrics(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Type", "text/plain")
        self.end_headers()
        self.wfile.write(b"sample 42\\n")

http.server.ThreadingHTTPServer((os.environ["POD_IP"], 8000), Metrics).serve_forever()
"""
POD_IP = {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}


async def run(pods, name: str, labels: dict[str, str], port: str) -> None:
    container = {"name": "main", "image": "none", "command": ["python3", "-c", SERVE], "env": [POD_IP]}
    container["ports"] = [{"name": port, "containerPort": 8000}]
    metadata = {"name": name, "labels": labels}
    spec = {"containers": [container], "terminationGracePeriodSeconds": 0}
    await pods.apply({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec})


async def test_pods_of_both_clusters_are_scraped_with_their_labels(sandbox, hub, member):
    ours = {"app.kubernetes.io/part-of": "prfaas"}
    worker = {"prfaas.io/pool": "offload", "prfaas.io/role": "prefill", "prfaas.io/cluster": "prefill-eu"}
    await run(hub, "gateway", {**ours, "prfaas.io/policy": "kimi"}, "admin")
    await run(member, "worker", {**ours, **worker}, "api")
    await run(member, "stranger", {}, "api")
    await run(member, "silent", ours, "data")

    async def both_seen():
        found = await query(sandbox.prometheus_url, "sample")
        return found if len(found) >= 2 else None

    found = await hub.eventually(both_seen, "samples of both pods")
    wanted = ("cluster", "pool", "role", "policy", "pod", "namespace")
    shown = {each["pod"]: {key: each[key] for key in wanted if key in each} for each in found}
    assert shown == {
        "gateway": {"cluster": "hub", "policy": "kimi", "pod": "gateway", "namespace": "default"},
        "worker": {
            "cluster": "prefill-eu",
            "pool": "offload",
            "role": "prefill",
            "pod": "worker",
            "namespace": "default",
        },
    }


async def query(url: str, expression: str) -> list[dict[str, str]]:
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"{url}/api/v1/query?query={urllib.parse.quote(expression)}") as response,
    ):
        return [each["metric"] for each in json.loads(await response.text())["data"]["result"]]
