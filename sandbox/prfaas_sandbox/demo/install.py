"""Installs prfaas into the sandbox's two clusters the way a user would: Helm, `prfaas cluster join`, `kubectl apply`.

Nothing is created by hand here: what these three commands cannot do, the product cannot do.
"""

import asyncio
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

from prfaas.errors import ConfigError, PeerError
from prfaas_sandbox.sandbox import Sandbox

NAMESPACE = "prfaas"
MEMBER = "prefill-eu"
POLICY = "kimi"
MODEL = "kimi-linear-tiny"
OFFLOAD_POOL = "offload"
EXAMPLE = "examples/two-clusters.yaml"
COMMAND_TIMEOUT_SECONDS = 120.0


class Installation:
    """prfaas, installed and Ready in a running sandbox."""

    namespace = NAMESPACE
    member_name = MEMBER

    def __init__(self, sandbox: Sandbox):
        self.sandbox = sandbox
        self.gateway_url = ""

    @classmethod
    async def create(cls, sandbox: Sandbox, *, report: Callable[[str], None]) -> "Installation":
        """Install both charts, join the member cluster, apply the example and wait until its policy is Ready.

        Raises:
            PeerError: a command failed or something did not become Ready in time; the message carries its last words.

        """
        self = cls(sandbox)
        report("helm install prfaas and prfaas-member")
        charts = repository_root() / "charts"
        await asyncio.gather(
            sandbox.helm(
                sandbox.hub, "install", "prfaas", str(charts / "prfaas"), "-n", NAMESPACE, "--create-namespace"
            ),
            sandbox.helm(
                sandbox.member,
                "install",
                "prfaas",
                str(charts / "prfaas-member"),
                "-n",
                NAMESPACE,
                "--create-namespace",
            ),
        )
        report(f"prfaas cluster join {MEMBER}")
        await self.join()
        report(f"kubectl apply -f {EXAMPLE}")
        await sandbox.kubectl(sandbox.hub, "apply", "-f", str(repository_root() / EXAMPLE))
        report("waiting for workers in both clusters, the gateway and the policy")
        await self.wait_ready("prfaaspolicy", POLICY, timeout_seconds=COMMAND_TIMEOUT_SECONDS)
        # Ready serves requests; offload begins once the scheduler has seen the link.
        await self.wait_for("LinkHealthy", "prfaaspolicy", POLICY, timeout_seconds=COMMAND_TIMEOUT_SECONDS)
        self.gateway_url = await sandbox.forward(sandbox.hub, NAMESPACE, f"{POLICY}-gateway", 80)
        return self

    async def join(self) -> None:
        """Register the member cluster in the hub by the command users run."""
        member, hub = self.sandbox.member, self.sandbox.hub
        command = [sys.executable, "-m", "prfaas.cli.main", "cluster", "join", MEMBER]
        command += [
            "--kubeconfig",
            str(member.kubeconfig),
            "--hub-kubeconfig",
            str(hub.kubeconfig),
            "--namespace",
            NAMESPACE,
        ]
        command += ["--server", member.internal_server, "--link-mbps", "100"]
        process = await asyncio.create_subprocess_exec(
            *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
        )
        output, _ = await asyncio.wait_for(process.communicate(), COMMAND_TIMEOUT_SECONDS)
        if process.returncode != 0:
            raise PeerError(f"prfaas cluster join {MEMBER} failed: {output.decode().strip()}")

    async def wait_ready(self, kind: str, name: str, *, timeout_seconds: float) -> None:
        """Wait until an object of the hub is Ready, as `wait_for` does."""
        await self.wait_for("Ready", kind, name, timeout_seconds=timeout_seconds)

    async def wait_for(self, condition: str, kind: str, name: str, *, timeout_seconds: float) -> None:
        """Wait until a condition of an object of the hub is True.

        Raises:
            PeerError: it has not within the time; the message holds the object's own conditions.

        """
        try:
            await self.sandbox.kubectl(
                self.sandbox.hub,
                "-n",
                NAMESPACE,
                "wait",
                f"--for=condition={condition}",
                f"{kind}/{name}",
                f"--timeout={max(int(timeout_seconds), 1)}s",
            )
        except PeerError as error:
            why = await self._conditions()
            raise PeerError(f"{kind} {name} is not {condition} after {timeout_seconds:.0f} s:\n{why}") from error

    async def _conditions(self) -> str:
        """Return the conditions of everything of prfaas in the hub, a line each."""
        listing = await self.sandbox.kubectl(self.sandbox.hub, "-n", NAMESPACE, "get", "prfaas-all", "-o", "json")
        return "\n".join(
            f"{item['kind']}/{item['metadata']['name']}: {c['type']}={c['status']} {c['reason']} {c.get('message', '')}"
            for item in json.loads(listing)["items"]
            for c in item.get("status", {}).get("conditions", [])
        )

    async def ready_pod(self, pool: str) -> str:
        """Return the name of a Running worker pod of the offload pool in the member cluster."""
        return await self.sandbox.kubectl(
            self.sandbox.member, "-n", NAMESPACE, "get", "pods", "-l", f"prfaas.io/pool={pool}",
            "--field-selector=status.phase=Running", "-o", "jsonpath={.items[0].metadata.name}",
        )  # fmt: skip

    def next_commands(self) -> str:
        """Return what a person may try next, with the addresses of this run."""
        hub, member = self.sandbox.hub.kubeconfig, self.sandbox.member.kubeconfig
        kubectl = self.sandbox.program("kubectl")
        prfaas = os.path.relpath(Path(sys.executable).with_name("prfaas"))
        return f"""
Still running. Ctrl-C stops everything. In another terminal:
  curl {self.gateway_url}/v1/completions -H 'content-type: application/json' \\
       -d '{{"model": "{MODEL}", "prompt": "The with statement", "max_tokens": 40}}'
  {kubectl} --kubeconfig {hub} -n {NAMESPACE} get prfaas-all
  {kubectl} --kubeconfig {hub} -n {NAMESPACE} scale pfpool/local --replicas=2
  {kubectl} --kubeconfig {member} -n {NAMESPACE} logs deployment/{OFFLOAD_POOL} -f
  {prfaas} sandbox link 5        # narrow the link to 5 Mbit/s
  Prometheus: {self.sandbox.prometheus_url}"""


def repository_root() -> Path:
    """Return the checkout this package was installed from.

    Raises:
        ConfigError: the package does not run from a checkout, so that charts and examples are not at hand.

    """
    root = Path(__file__).resolve().parents[3]
    if not (root / "charts" / "prfaas").is_dir():
        raise ConfigError(f"the demo runs from a checkout of the repository (make demo); {root} has no charts/prfaas")
    return root
