"""`prfaas sandbox`: two real clusters on this machine, without Docker."""

import asyncio
import json
import os
import signal
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from prfaas.console import TextOrJson, new_app
from prfaas.errors import ConfigError, PeerError
from prfaas.processes import tail
from prfaas.util import Deadline
from prfaas_sandbox.api import connect
from prfaas_sandbox.credentials import read_kubeconfig
from prfaas_sandbox.environment import ClusterAccess
from prfaas_sandbox.network import checked_rate
from prfaas_sandbox.progress import console, progress
from prfaas_sandbox.sandbox import DEFAULT_LINK_MBPS, Description, Sandbox, change_link, link_rate
from prfaas_sandbox.state import StateFolder
from prfaas_sandbox.tools import ensure_tools
from prfaas_sandbox.vllm import ensure_vllm

DOWN_TIMEOUT_SECONDS = 15.0
POLL_SECONDS = 0.1

app = new_app(
    help="Two real Kubernetes control planes with process nodes and a shaped link. Example: prfaas sandbox up",
    no_args_is_help=True,
)

StateOption = Annotated[Path, typer.Option("--state", help="Folder of the sandbox's sockets, kubeconfigs and logs.")]
DEFAULT_STATE = Path(".prfaas/sandbox")


@app.command()
def build() -> None:
    """Build etcd, Kubernetes, Helm and Prometheus from tools/*/go.mod, once. Example: prfaas sandbox build."""
    with progress() as report:
        tools = ensure_tools(report)
    for name, path in tools.paths.items():
        typer.echo(f"{name}\t{path}")


@app.command()
def vllm() -> None:
    """Install a vLLM that runs without a GPU, once, in its own environment. Example: prfaas sandbox vllm."""
    with progress() as report:
        python = ensure_vllm(report)
    typer.echo(python)


@app.command()
def up(
    state: StateOption = DEFAULT_STATE,
    link_mbps: Annotated[float, typer.Option("--link-mbps", help="Rate of the link, each way.")] = DEFAULT_LINK_MBPS,
) -> None:
    """Start both clusters and keep them until Ctrl-C. Example: prfaas sandbox up --link-mbps 200."""
    checked_rate(link_mbps)
    with progress() as report:
        ensure_tools(report)  # before asyncio takes the signals over, so that Ctrl-C also ends a build
    asyncio.run(_up(state, link_mbps))


async def _up(state: Path, link_mbps: float) -> None:
    running = asyncio.current_task()
    stopped = False

    def stop() -> None:
        nonlocal stopped
        stopped = True
        if running is not None:
            running.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop)
    try:
        await _run(state, link_mbps)
    except asyncio.CancelledError:
        if not stopped:
            raise


async def _run(state: Path, link_mbps: float) -> None:
    async with AsyncExitStack() as stack:
        with progress() as report:
            sandbox = await stack.enter_async_context(Sandbox.start(state, link_mbps=link_mbps, report=report))
        _show(sandbox.description, link_mbps)
        console.print("Ctrl-C stops everything.")
        await sandbox.wait_broken()


@app.command()
def down(state: StateOption = DEFAULT_STATE) -> None:
    """Stop a sandbox that runs in another terminal. Example: prfaas sandbox down."""
    folder = StateFolder(state.absolute())
    pid = folder.owner()
    if pid is None:
        typer.echo(f"no sandbox runs in {folder.root}")
        return
    os.kill(pid, signal.SIGTERM)
    deadline = Deadline(DOWN_TIMEOUT_SECONDS)
    while folder.owner() is not None:
        if deadline.is_over:
            os.kill(pid, signal.SIGKILL)  # the inside ends with it all the same
        time.sleep(POLL_SECONDS)
    typer.echo(f"stopped the sandbox in {folder.root}")


@app.command()
def status(state: StateOption = DEFAULT_STATE, output: TextOrJson = "text") -> None:
    """Show what runs and where; exit code 1 when nothing does. Example: prfaas sandbox status -o json."""
    description = _describe(StateFolder(state.absolute()))
    found = asyncio.run(_inspect(StateFolder(state.absolute()), description))
    if output == "json":
        typer.echo(json.dumps(found, indent=2, default=str))
        return
    _show(description, found["link_mbps"])
    for name, cluster in found["clusters"].items():
        typer.echo(f"{name}: {cluster['state']}, {cluster['running_pods']} of {cluster['pods']} pods running")


def _describe(state: StateFolder) -> Description:
    if state.owner() is None:
        raise ConfigError(f"no sandbox runs in {state.root}: start one with `prfaas sandbox up`, or name its --state")
    if not state.description.exists():
        raise ConfigError(f"the sandbox in {state.root} is still starting")
    return Description.read(state.description)


async def _inspect(state: StateFolder, description: Description) -> dict[str, Any]:
    clusters = {each.name: await _inspect_cluster(each) for each in (description.hub, description.member)}
    return {
        "pid": state.owner(),
        "state": state.root,
        "start_seconds": description.start_seconds,
        "link_mbps": await link_rate(state),
        "prometheus_url": description.prometheus_url,
        "prometheus_internal_url": description.prometheus_internal_url,
        "clusters": clusters,
    }


async def _inspect_cluster(cluster: ClusterAccess) -> dict[str, Any]:
    found: dict[str, Any] = {"kubeconfig": cluster.kubeconfig, "internal_server": cluster.internal_server}
    try:
        async with connect(read_kubeconfig(cluster.kubeconfig)) as api, api.stream("GET", "/readyz"):
            pods = (await api.call("GET", "/api/v1/pods"))["items"]
    except PeerError as error:
        return {**found, "state": f"not ready: {error}", "pods": 0, "running_pods": 0}
    running = sum(pod["status"].get("phase") == "Running" for pod in pods)
    return {**found, "state": "ready", "pods": len(pods), "running_pods": running}


def _show(description: Description, link_mbps: float) -> None:
    table = Table(box=None, show_header=False)
    for cluster in (description.hub, description.member):
        table.add_row(cluster.name, f"kubectl --kubeconfig {cluster.kubeconfig} get pods -A")
    table.add_row("Prometheus", description.prometheus_url)
    table.add_row("link", f"{link_mbps:g} Mbit/s each way")
    Console(highlight=False, soft_wrap=True).print(table)


@app.command()
def link(
    mbps: Annotated[float, typer.Argument(help="New rate in Mbit/s, each way.")], state: StateOption = DEFAULT_STATE
) -> None:
    """Change the rate of the link while it is in use. Example: prfaas sandbox link 5."""
    folder = StateFolder(state.absolute())
    _describe(folder)
    asyncio.run(change_link(folder, mbps))
    typer.echo(f"the link carries {mbps:g} Mbit/s each way")


@app.command()
def logs(
    name: Annotated[str, typer.Argument(help="For example hub/kube-apiserver; all names when left out.")] = "",
    state: StateOption = DEFAULT_STATE,
) -> None:
    """Show the end of a log of the sandbox itself. Example: prfaas sandbox logs hub/kube-scheduler."""
    folder = StateFolder(state.absolute()).logs
    known = {str(path.relative_to(folder).with_suffix("")): path for path in sorted(folder.rglob("*.log"))}
    if not name:
        typer.echo("\n".join(known))
    elif name in known:
        typer.echo(tail(known[name]))
    else:
        raise ConfigError(f"there is no log {name!r} in {folder}; `prfaas sandbox logs` lists them")
