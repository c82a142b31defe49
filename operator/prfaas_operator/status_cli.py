"""`prfaas status`, also `kubectl prfaas status`: shows pools, links and problems of all clusters, from the hub only."""

import asyncio
import json
from dataclasses import asdict
from datetime import datetime
from typing import Annotated, Final

import typer
from rich.console import Console
from rich.live import Live

from prfaas.api import DecodePool, MemberCluster, PrefillPool, PrfaaSPolicy
from prfaas.console import HubContext, HubKubeconfig, HubNamespace, TableOrJson, new_app
from prfaas.errors import PeerError
from prfaas_operator.clusters import kinds
from prfaas_operator.clusters.client import ClusterClient
from prfaas_operator.clusters.connect import KubeContext, open_context
from prfaas_operator.plan.reading import read_each
from prfaas_operator.status_view import Overview, drawn, lines, overview

REFRESH_SECONDS: Final = 1.0

app = new_app()


async def look(hub: ClusterClient) -> Overview:
    """Read the objects of the hub's namespace once."""
    members, prefill, decode, policies = await asyncio.gather(
        *(hub.list_all(kind) for kind in (kinds.MEMBER_CLUSTER, kinds.PREFILL_POOL, kinds.DECODE_POOL, kinds.POLICY))
    )
    pools = [*read_each(DecodePool, decode), *read_each(PrefillPool, prefill)]
    known = read_each(MemberCluster, members), pools, read_each(PrfaaSPolicy, policies)
    return overview(hub.namespace, *known, hub.now())


@app.command()
def status(
    context: HubContext = None,
    kubeconfig: HubKubeconfig = None,
    namespace: HubNamespace = "prfaas",
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Show changes until Ctrl-C.")] = False,
    output: TableOrJson = "table",
) -> None:
    """Show both clusters, pools, link, threshold and problems. Example: prfaas status --watch.

    With --watch and -o json every change is one line.
    """
    target = KubeContext(kubeconfig, context, namespace)
    console = Console()
    try:
        asyncio.run(_follow(target, console, output) if watch else _once(target, console, output))
    except KeyboardInterrupt:
        if not watch:
            raise


async def _once(target: KubeContext, console: Console, output: str) -> None:
    async with open_context(target) as there:
        view = await look(there)
    _show(view, console, output)


def _show(view: Overview, console: Console, output: str) -> None:
    if output == "json":
        typer.echo(json.dumps(asdict(view)))
    elif console.is_terminal:
        console.print(drawn(view, _title(view)))
    else:
        typer.echo("\n".join(lines(view, _title(view))))


def _title(view: Overview) -> str:
    return f"prfaas in namespace {view.namespace}, {datetime.now():%H:%M:%S}"


async def _follow(target: KubeContext, console: Console, output: str) -> None:
    """Show the present state again and again; if the API server does not answer, show that and wait."""
    async with open_context(target) as there:
        if output == "json" or not console.is_terminal:
            await _follow_changes(there, console, output)
            return
        view = await look(there)
        with Live(drawn(view, _title(view)), console=console, auto_refresh=False, screen=True) as live:
            while True:
                try:
                    view = await look(there)
                    live.update(drawn(view, _title(view)), refresh=True)
                except PeerError as error:
                    live.update(drawn(view, f"{_title(view)}: not fresh, {error}"), refresh=True)
                await asyncio.sleep(REFRESH_SECONDS)


async def _follow_changes(hub: ClusterClient, console: Console, output: str) -> None:
    known: Overview | None = None
    while True:
        view = await look(hub)
        if known is None or _without_ages(view) != _without_ages(known):
            _show(view, console, output)
        known = view
        await asyncio.sleep(REFRESH_SECONDS)


def _without_ages(view: Overview) -> dict:
    facts = asdict(view)
    for cluster in facts["clusters"]:
        cluster["contact_seconds"] = None
    return facts
