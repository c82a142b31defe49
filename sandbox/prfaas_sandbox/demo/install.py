"""Installs prfaas into two clusters as a user does: Helm, `prfaas cluster join`, `kubectl apply`.

It creates no object in another way, so it proves that the three commands are enough.
"""

import asyncio
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import yaml

from prfaas.errors import ConfigError, PeerError, UnreachableError
from prfaas.util import Deadline
from prfaas_sandbox.demo.records import EngineType
from prfaas_sandbox.environment import ClusterAccess, Environment, Images

NAMESPACE = "prfaas"
MEMBER = "prefill-eu"
POLICY = "kimi"
MODEL = "kimi-linear-tiny"
OFFLOAD_POOL = "offload"
HUB_CIDR = "10.0.0.0/8"
"""The hub's pods have addresses of it in the sandbox and in kind."""
COMMAND_TIMEOUT_SECONDS = 240.0
TIMED_OUT = "timed out waiting for the condition"  # kubectl's words


class ExampleFile(NamedTuple):
    """An example: its engine, policy and model. Its pool in the member cluster is OFFLOAD_POOL."""

    engine: EngineType = "prfaas"
    path: str = "examples/two-clusters.yaml"
    policy: str = POLICY
    model: str = MODEL
    ready_seconds: float = 600.0
    """Limit of its start. A vLLM alone imports modules for 20 to 45 s; three of them share the machine's cores."""
    recovery_seconds: float = 240.0
    """Likewise of a killed instance's."""


OUR_WORKERS = ExampleFile()
ON_VLLM = ExampleFile(
    "vllm", "examples/two-clusters-vllm.yaml", "qwen", "qwen3-next-tiny", ready_seconds=900.0, recovery_seconds=600.0
)


class ExampleInstallation:
    """prfaas, installed and Ready in two clusters."""

    namespace = NAMESPACE
    member_name = MEMBER

    def __init__(self, environment: Environment, file: ExampleFile = OUR_WORKERS):
        self.environment = environment
        self.file = file
        self.gateway_url = ""

    @classmethod
    async def create(
        cls, environment: Environment, *, report: Callable[[str], None], file: ExampleFile = OUR_WORKERS
    ) -> "ExampleInstallation":
        """Install both charts, join the member cluster, apply the example and wait until its policy is Ready.

        Raises PeerError, with the last output, after a failed command or if an object is not Ready in time.
        """
        self = await cls.without_objects(environment, report=report, file=file)
        report(f"kubectl apply -f {file.path}")
        objects = example((repository_root() / file.path).read_text(), environment.images)
        await environment.kubectl(environment.hub, "apply", "-f", "-", stdin=objects)
        report("waiting for workers in both clusters, the gateway and the policy")
        await self.wait_ready("prfaaspolicy", file.policy, timeout_seconds=file.ready_seconds)
        # Ready serves requests; offload begins once the scheduler has seen the link.
        await self.wait_for("LinkHealthy", "prfaaspolicy", file.policy, timeout_seconds=file.ready_seconds)
        self.gateway_url = await environment.forward(environment.hub, NAMESPACE, f"{file.policy}-gateway", 80)
        return self

    @classmethod
    async def without_objects(
        cls,
        environment: Environment,
        *,
        report: Callable[[str], None],
        file: ExampleFile = OUR_WORKERS,
        link_mbps: int = 100,
    ) -> "ExampleInstallation":
        """Install both charts and join the member cluster, and no more."""
        self = cls(environment, file)
        report("helm install prfaas and prfaas-member")
        await asyncio.gather(
            self.helm_install(environment.hub, "prfaas", *operator_values(environment.images)),
            self.helm_install(environment.member, "prfaas-member", "--set", f"networkPolicy.hubCidrs={{{HUB_CIDR}}}"),
        )
        report(f"prfaas cluster join {MEMBER}")
        await self.join(link_mbps)
        return self

    async def helm_install(self, cluster: ClusterAccess, chart: str, *arguments: str) -> None:
        """Install one of our charts as the release `prfaas`, or upgrade the release."""
        path = str(repository_root() / "charts" / chart)
        words = ("upgrade", "--install", "prfaas", path, "-n", NAMESPACE, "--create-namespace", *arguments)
        await self.environment.helm(cluster, *words)

    async def join(self, link_mbps: int = 100) -> None:
        """Register the member cluster in the hub by the users' command."""
        member, hub = self.environment.member, self.environment.hub
        command = [sys.executable, "-m", "prfaas.cli.main", "cluster", "join", MEMBER]
        command += [
            "--kubeconfig",
            str(member.kubeconfig),
            "--hub-kubeconfig",
            str(hub.kubeconfig),
            "--namespace",
            NAMESPACE,
        ]
        command += ["--server", member.internal_server, "--link-mbps", str(link_mbps)]
        process = await asyncio.create_subprocess_exec(
            *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
        )
        output, _ = await asyncio.wait_for(process.communicate(), COMMAND_TIMEOUT_SECONDS)
        if process.returncode != 0:
            raise PeerError(f"prfaas cluster join {MEMBER} failed: {output.decode().strip()}")

    async def wait_ready(self, kind: str, name: str, *, timeout_seconds: float) -> None:
        await self.wait_for("Ready", kind, name, timeout_seconds=timeout_seconds)

    async def wait_for(self, condition: str, kind: str, name: str, *, timeout_seconds: float) -> None:
        """Wait until a condition of an object of the hub is True.

        Raises PeerError, with the object's own conditions: an UnreachableError when time is up.
        """
        deadline = Deadline(timeout_seconds)
        wanted = (f"--for=condition={condition}", f"{kind}/{name}")
        while True:
            seconds = max(1, int(min(deadline.left_seconds, COMMAND_TIMEOUT_SECONDS)))  # no command may run for longer
            words = ("-n", NAMESPACE, "wait", *wanted, f"--timeout={seconds}s")
            try:
                await self.environment.kubectl(self.environment.hub, *words)
                return
            except PeerError as error:
                timed_out = TIMED_OUT in str(error)
                if timed_out and not deadline.is_over:
                    continue
                why = await self._conditions()
                message = f"{kind} {name} is not {condition} after {timeout_seconds:.0f} s:\n{why}"
                if timed_out:
                    raise UnreachableError(message) from TimeoutError(str(error))
                raise PeerError(message) from error

    async def _conditions(self) -> str:
        """Return the conditions of all prfaas objects in the hub, a line each."""
        listing = await self.environment.kubectl(
            self.environment.hub, "-n", NAMESPACE, "get", "prfaas-all", "-o", "json"
        )
        return "\n".join(
            f"{item['kind']}/{item['metadata']['name']}: {c['type']}={c['status']} {c['reason']} {c.get('message', '')}"
            for item in json.loads(listing)["items"]
            for c in item.get("status", {}).get("conditions", [])
        )

    async def hub_log(self, pod: str) -> str:
        """Return the log of a pod in the hub, or of `deployment/NAME`."""
        return await self.environment.kubectl(self.environment.hub, "-n", NAMESPACE, "logs", pod)

    async def has_restarted(self, pod: str) -> bool:
        """Return whether a pod of the hub, killed once, is ready again."""
        status = json.loads(
            await self.environment.kubectl(self.environment.hub, "-n", NAMESPACE, "get", "pod", pod, "-o", "json")
        )["status"]
        return all(one["restartCount"] > 0 and one["ready"] for one in status["containerStatuses"])

    async def ready_pod(self, pool: str) -> str:
        """Return the name of a Running worker pod of the offload pool in the member cluster."""
        return await self.environment.kubectl(
            self.environment.member, "-n", NAMESPACE, "get", "pods", "-l", f"prfaas.io/pool={pool}",
            "--field-selector=status.phase=Running", "-o", "jsonpath={.items[0].metadata.name}",
        )  # fmt: skip

    def next_commands(self, opening: str) -> str:
        """Return commands to try next, with the addresses of this run, below an opening."""
        hub, member = self.environment.hub.kubeconfig, self.environment.member.kubeconfig
        kubectl = self.environment.program("kubectl")
        prfaas = os.path.relpath(Path(sys.executable).with_name("prfaas"))
        return f"""
{opening}
  curl {self.gateway_url}/v1/completions -H 'content-type: application/json' \\
       -d '{{"model": "{self.file.model}", "prompt": "The with statement", "max_tokens": 40}}'
  {kubectl} --kubeconfig {hub} -n {NAMESPACE} get prfaas-all
  {kubectl} --kubeconfig {hub} -n {NAMESPACE} scale pfpool/{OFFLOAD_POOL} --replicas=2
  {kubectl} --kubeconfig {member} -n {NAMESPACE} logs deployment/{OFFLOAD_POOL} -f
  {prfaas} {self.environment.command} link 5        # narrow the link to 5 Mbit/s
  Prometheus: {self.environment.prometheus_url}"""


def operator_values(images: Images | None) -> list[str]:
    """Return the Helm flags for our own images, none for the chart's."""
    if images is None:
        return []
    repository, _, tag = images.operator.rpartition(":")
    values = {
        "operator.image.repository": repository,
        "operator.image.tag": tag,
        "gatewayImage": images.gateway,
        "workerImage": images.worker,
        "connectorImage": images.connector,
    }
    return [word for name, value in values.items() for word in ("--set", f"{name}={value}")]


def example(text: str, images: Images | None) -> str:
    """Return the example's objects for kubectl, with our own image of vLLM in place of the published one."""
    if images is None:
        return text
    objects = list(yaml.safe_load_all(text))
    for each in objects:
        engine = each["spec"].get("engine", {})
        if engine.get("type") == "vllm":
            engine["image"] = images.vllm
    return yaml.safe_dump_all(objects)


def repository_root() -> Path:
    """Return the checkout that this package was installed from.

    Raises ConfigError outside of a checkout, which has no charts and examples.
    """
    root = Path(__file__).resolve().parents[3]
    if not (root / "charts" / "prfaas").is_dir():
        raise ConfigError(f"the demo runs from a checkout of the repository (make demo); {root} has no charts/prfaas")
    return root
