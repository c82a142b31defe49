"""`prfaas kind`: two clusters of real containers on this machine, with prfaas installed in them."""

import asyncio
import json
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from prfaas.console import TextOrJson, new_app
from prfaas.errors import ConfigError, PeerError, PrfaasError
from prfaas_sandbox.demo.install import ExampleInstallation, repository_root
from prfaas_sandbox.kind import clusters
from prfaas_sandbox.kind.docker import daemon_answers, inspect
from prfaas_sandbox.kind.environment import KindEnvironment, down, mapped
from prfaas_sandbox.kind.layout import GATEWAY_NODE_PORT, PROMETHEUS_NODE_PORT, KindCluster, Layout
from prfaas_sandbox.network import checked_rate
from prfaas_sandbox.progress import console, progress

DEFAULT_LINK_MBPS = 100.0
STATE = Path(".prfaas/kind")

app = new_app(help="Two kind clusters in Docker, prfaas in containers. Example: prfaas kind up", no_args_is_help=True)

LinkOption = Annotated[float, typer.Option("--link-mbps", help="Rate of the link, each way.")]


def layout() -> Layout:
    """Return the one pair of clusters that these commands use."""
    root = repository_root()
    return Layout(root, root / STATE)


@app.command("up")
def up(link_mbps: LinkOption = DEFAULT_LINK_MBPS) -> None:
    """Build images, create both clusters, install prfaas; again reuses all. Example: prfaas kind up."""
    checked_rate(link_mbps)
    asyncio.run(_up(link_mbps))


async def _up(link_mbps: float) -> None:
    started = time.monotonic()
    try:
        with progress() as report:
            environment = await KindEnvironment.up(layout(), link_mbps=link_mbps, report=report)
            installation = await ExampleInstallation.create(environment, report=report)
    except asyncio.CancelledError:
        console.print("Interrupted. `make kind` continues; `make kind-down` removes everything.")
        raise
    except PrfaasError:
        console.print("`make kind` failed. Run it again to continue, or `make kind-down` to remove everything.")
        raise
    typer.echo(f"Both clusters are up and run prfaas after {time.monotonic() - started:.0f} s.")
    typer.echo(installation.next_commands("The clusters run until `make kind-down`. Try:"))


@app.command("down")
def remove(purge: Annotated[bool, typer.Option("--purge", help="Remove the built images too.")] = False) -> None:
    """Remove clusters, network and files; images stay for the next time. Example: prfaas kind down --purge."""
    asyncio.run(down(layout(), purge=purge))
    typer.echo("Nothing of the kind clusters is left" + ("." if purge else " but images (PURGE=1 removes them)."))


@app.command("link")
def link(mbps: Annotated[float, typer.Argument(help="New rate in Mbit/s, each way.")]) -> None:
    """Change the rate of the link while it is in use. Example: prfaas kind link 5."""

    async def shape() -> None:
        await _require_running()
        await clusters.shape_link(layout(), checked_rate(mbps))

    asyncio.run(shape())
    typer.echo(f"the link carries {mbps:g} Mbit/s each way")


@app.command("status")
def status(output: TextOrJson = "text") -> None:
    """Show what runs and where; exit code 1 when nothing does. Example: prfaas kind status -o json."""
    found = asyncio.run(_status())
    if output == "json":
        typer.echo(json.dumps(found, indent=2))
        return
    for cluster in found["clusters"]:
        typer.echo(f"{cluster['name']}: kubectl --kubeconfig {cluster['kubeconfig']} get pods -A")
    for key in ("gateway_url", "prometheus_url"):
        typer.echo(f"{key.removesuffix('_url')}: {found[key]}")
    typer.echo(f"link: {found['link_mbps']:g} Mbit/s each way")


async def _status() -> dict[str, Any]:
    pair = await _require_running()
    return {
        "clusters": [_facts(cluster) for cluster in pair.clusters],
        "gateway_url": await mapped(pair, GATEWAY_NODE_PORT),
        "prometheus_url": await mapped(pair, PROMETHEUS_NODE_PORT),
        "link_mbps": await clusters.link_rate(pair),
    }


def _facts(cluster: KindCluster) -> dict[str, str]:
    return {"name": cluster.name, "node": cluster.node, "kubeconfig": str(cluster.kubeconfig)}


async def _require_running() -> Layout:
    pair = layout()
    if not await daemon_answers():
        raise ConfigError("Docker's daemon does not run, so no clusters run: start them with `make kind`")
    try:
        running = await inspect("{{.State.Running}}", *(cluster.node for cluster in pair.clusters))
    except PeerError as error:
        raise ConfigError("the kind clusters are not up: start them with `make kind`") from error
    if running != ["true", "true"]:
        raise ConfigError("a node of the kind clusters is stopped: `make kind` starts it again")
    return pair
