"""Installs Prometheus in the hub of a kind pair: the sandbox's configuration, and a token for each cluster."""

import asyncio
import base64
import json
from pathlib import Path

import yaml

from prfaas.errors import PeerError
from prfaas.util import Deadline
from prfaas_sandbox.environment import ClusterAccess, run_in
from prfaas_sandbox.kind.layout import Layout
from prfaas_sandbox.prometheus import configuration

NAMESPACE = "monitoring"
FOLDER = Path("/etc/prometheus")
TOKEN_TIMEOUT_SECONDS = 60.0
READY_SECONDS = 180
POLL_SECONDS = 0.3


async def install(kubectl: str, layout: Layout, clusters: tuple[ClusterAccess, ClusterAccess], image: str) -> None:
    """Run Prometheus in the first of two clusters, and wait until it is ready. Repeating is harmless."""
    account = str(layout.configs / "prometheus-account.yaml")
    files = {"prometheus.yaml": configuration({cluster.name: FOLDER / cluster.name for cluster in clusters})}
    for cluster in clusters:
        await run_in(kubectl, cluster, ["apply", "-f", account])
        files[cluster.name] = await _kubeconfig(kubectl, cluster)
    secret = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": "prometheus", "namespace": NAMESPACE},
        "stringData": files,
    }
    parts = [secret, *manifests((layout.configs / "prometheus.yaml").read_text(), image)]
    hub = clusters[0]
    await run_in(kubectl, hub, ["apply", "-f", "-"], json.dumps({"apiVersion": "v1", "kind": "List", "items": parts}))
    await run_in(
        kubectl, hub, ["-n", NAMESPACE, "rollout", "status", "deployment/prometheus", f"--timeout={READY_SECONDS}s"]
    )


def manifests(text: str, image: str) -> list[dict]:
    """Return the objects of a file, with an image for the Deployment."""
    parts = list(yaml.safe_load_all(text))
    for part in parts:
        if part["kind"] == "Deployment":
            part["spec"]["template"]["spec"]["containers"][0]["image"] = image
    return parts


async def _kubeconfig(kubectl: str, cluster: ClusterAccess) -> str:
    """Return a kubeconfig with the account's token, as soon as there is one."""
    deadline = Deadline(TOKEN_TIMEOUT_SECONDS)
    while True:
        found = await run_in(kubectl, cluster, ["-n", NAMESPACE, "get", "secret", "prometheus-token", "-o", "json"])
        data = json.loads(found).get("data", {})
        if "token" in data and "ca.crt" in data:
            break
        if deadline.is_over:
            raise PeerError(
                f"Secret prometheus-token of cluster {cluster.name} got no token in {TOKEN_TIMEOUT_SECONDS:g} s"
            )
        await asyncio.sleep(POLL_SECONDS)
    server = {"server": cluster.internal_server, "certificate-authority-data": data["ca.crt"]}
    document = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": cluster.name, "cluster": server}],
        "users": [{"name": "prometheus", "user": {"token": base64.b64decode(data["token"]).decode()}}],
        "contexts": [{"name": cluster.name, "context": {"cluster": cluster.name, "user": "prometheus"}}],
        "current-context": cluster.name,
    }
    return json.dumps(document)
