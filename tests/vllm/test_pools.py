"""Proves that a pool of vLLM starts as the operator renders it, and answers through the gateway: in the sandbox.

The image's name alone is vLLM's. The process node has no images, so the pool's own PATH leads to the environment with
vLLM, and the connector's image gives what a checkout holds.
"""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from prfaas_sandbox.demo.install import NAMESPACE, ExampleInstallation, operator_values
from prfaas_sandbox.sandbox import Sandbox
from prfaas_worker.assets import model_directory

from .conftest import MODEL
from .engines import VARIABLES

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(480)]

START_SECONDS = 300.0
FLAGS = (
    *("--enforce-eager", "--dtype", "bfloat16", "--gpu-memory-utilization", "0.1"),
    *("--kv-cache-memory-bytes", str(64 << 20), "--max-model-len", "4096"),
)
SYSTEM_PATH = "/usr/local/bin:/usr/bin:/bin"


def objects(python: Path) -> list[dict[str, Any]]:
    variables = VARIABLES | {"PATH": f"{python.parent}:{SYSTEM_PATH}"}
    pool = {
        "model": {"name": "tiny", "source": str(model_directory(MODEL))},
        "engine": {"type": "vllm", "image": "vllm/vllm-openai:v0.32.0", "args": list(FLAGS)},
        "template": {"env": [{"name": name, "value": value} for name, value in variables.items()]},
        "drainSeconds": 1,
    }
    policy = {"model": "tiny", "decodePool": "decode", "threshold": {"mode": "Disabled"}}
    return [
        {"apiVersion": "prfaas.io/v1alpha1", "kind": kind, "metadata": {"name": name}, "spec": spec}
        for kind, name, spec in (("DecodePool", "decode", pool), ("PrfaaSPolicy", "tiny", policy))
    ]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def installation(
    vllm_python: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[ExampleInstallation]:
    """The operator in a hub, with a pool of one vLLM and its policy, both ready."""
    async with Sandbox.start(tmp_path_factory.mktemp("pools") / "state", link_mbps=100, report=print) as sandbox:
        found = ExampleInstallation(sandbox)
        await found.helm_install(sandbox.hub, "prfaas", *operator_values(sandbox.images))
        items = {"apiVersion": "v1", "kind": "List", "items": objects(vllm_python)}
        await sandbox.kubectl(sandbox.hub, "-n", NAMESPACE, "apply", "-f", "-", stdin=json.dumps(items))
        await found.wait_ready("decodepool", "decode", timeout_seconds=START_SECONDS)
        await found.wait_ready("prfaaspolicy", "tiny", timeout_seconds=60)
        yield found


async def pod_of_decode(installation: ExampleInstallation) -> dict[str, Any]:
    environment = installation.environment
    selector = "prfaas.io/pool=decode"
    listed = await environment.kubectl(environment.hub, "-n", NAMESPACE, "get", "pods", "-l", selector, "-o", "json")
    (pod,) = json.loads(listed)["items"]
    return pod


async def test_a_pool_of_vllm_starts_with_our_connector_and_our_certificate(installation):
    pod = await pod_of_decode(installation)
    assert pod["metadata"]["labels"]["prfaas.io/engine"] == "vllm-prfaas"
    assert pod["metadata"]["annotations"]["prfaas.io/scheme"] == "https"
    (copied,) = pod["status"]["initContainerStatuses"]
    assert copied["state"]["terminated"]["exitCode"] == 0
    environment = installation.environment
    log = await environment.kubectl(environment.hub, "-n", NAMESPACE, "logs", pod["metadata"]["name"])
    assert "prfaas: data port" in log
    assert "SSLCertRefresher monitors files" in log


async def test_the_gateway_asks_vllm_inside_tls(installation):
    environment = installation.environment
    url = await environment.forward(environment.hub, NAMESPACE, "tiny-gateway", 80)
    body = {"model": "tiny", "prompt": "The operator starts a real engine. " * 4, "max_tokens": 8, "temperature": 0}
    async with httpx.AsyncClient(base_url=url, timeout=60) as client:
        answers = [(await client.post("/v1/completions", json=body)).raise_for_status() for _ in range(2)]
    assert len({answer.json()["choices"][0]["text"] for answer in answers}) == 1
    assert answers[0].headers["x-prfaas-decode-instance"] == (await pod_of_decode(installation))["metadata"]["name"]
