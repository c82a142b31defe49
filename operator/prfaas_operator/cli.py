"""`prfaas cluster`: joins, lists, checks, revokes and removes member clusters, for people and scripts (-o json)."""

import asyncio
import json
from datetime import timedelta
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from prfaas.api import MemberCluster
from prfaas.cli.certs import check_directory, write_files
from prfaas.console import HubContext, HubKubeconfig, HubNamespace, TableOrJson, new_app
from prfaas.rights import BUYER
from prfaas_operator import join as work
from prfaas_operator.check import check, is_well
from prfaas_operator.clusters import buyers
from prfaas_operator.clusters.connect import KubeContext
from prfaas_operator.plan.conditions import CERTIFICATE_READY, REACHABLE, READY
from prfaas_operator.plan.credentials import DEFAULT_TOKEN_DAYS
from prfaas_operator.plan.reading import read
from prfaas_operator.render.service_account import Registration

app = new_app(help="Register member clusters in the hub.", no_args_is_help=True)


class Addressing(StrEnum):
    POD_IP = "PodIP"
    HOST_IP = "HostIP"


MemberNamespace = Annotated[str | None, typer.Option(help="Namespace in the member cluster; by default the hub's.")]
ContextOption = Annotated[str | None, typer.Option(help="Kubeconfig context of the member cluster.")]
KubeconfigOption = Annotated[Path | None, typer.Option(help="Kubeconfig file of the member cluster.")]
TokenDays = Annotated[
    int, typer.Option(min=1, max=3650, help="Days that the token is valid; the operator renews it at half of them.")
]
WaitSeconds = Annotated[float, typer.Option(min=0, help="Longest wait for the operator.")]


@app.command("join")
def join(  # noqa: PLR0913, PLR0917  # a command line has one parameter a flag
    name: Annotated[str, typer.Argument(help="Name for pools' spec.clusterName.")],
    link_mbps: Annotated[int, typer.Option(min=1, help="Capacity of the link to the hub in Mbit/s.")],
    context: ContextOption = None,
    kubeconfig: KubeconfigOption = None,
    hub_context: HubContext = None,
    hub_kubeconfig: HubKubeconfig = None,
    namespace: HubNamespace = "prfaas",
    member_namespace: MemberNamespace = None,
    server: Annotated[
        str | None, typer.Option(help="Address of the member's API server as the hub reaches it, if not the context's.")
    ] = None,
    round_trip_millis: Annotated[int, typer.Option(min=0, help="Round-trip time of the link in ms.")] = 0,
    addressing: Annotated[
        Addressing, typer.Option(help="Address by which the hub reaches worker pods.")
    ] = Addressing.POD_IP,
    datacenter: Annotated[str, typer.Option(help="Datacenter name for policies' prefer and forbid.")] = "",
    region: Annotated[str, typer.Option(help="Free text.")] = "",
    token_days: TokenDays = DEFAULT_TOKEN_DAYS,
    wait_seconds: WaitSeconds = 30,
    output: TableOrJson = "table",
) -> None:
    """Register a member cluster. Example: prfaas cluster join prefill-eu --context eu --link-mbps 1000."""
    if context is None and kubeconfig is None:
        raise typer.BadParameter("name the member cluster by --context, --kubeconfig or both")
    target = KubeContext(kubeconfig, context, member_namespace or namespace)
    registration = Registration(
        name, target.namespace, link_mbps, round_trip_millis, addressing.value, datacenter, region
    )
    hub = KubeContext(hub_kubeconfig, hub_context, namespace)
    live = asyncio.run(work.join(hub, target, registration, server, token_days, wait_seconds))
    cluster = read(MemberCluster, live)
    if output == "json":
        typer.echo(json.dumps(_facts(cluster, ())))
    else:
        status = cluster.status
        typer.echo(f"{name} joined: {status.server_version}, {link_mbps} Mbit/s; use spec.clusterName: {name}")
        typer.echo(f"its token ends {status.token_expiration_time}; the operator renews it at half of its life")


@app.command("list")
def list_members(
    hub_context: HubContext = None,
    hub_kubeconfig: HubKubeconfig = None,
    namespace: HubNamespace = "prfaas",
    output: TableOrJson = "table",
) -> None:
    """List member clusters and the pools that run in them. Example: prfaas cluster list -o json."""
    rows = [
        _facts(*member) for member in asyncio.run(work.members(KubeContext(hub_kubeconfig, hub_context, namespace)))
    ]
    if output == "json":
        typer.echo(json.dumps(rows))
        return
    table = Table("NAME", "READY", "REACHABLE", "VERSION", "LINK MBIT/S", "POOLS", "WHY", box=None)
    for row in rows:
        table.add_row(
            *(str(row[key]) for key in ("name", "ready", "reachable", "version", "link_mbps")),
            ",".join(row["pools"]) or "-",
            row["reason"],
        )
    Console().print(table)


def _facts(cluster: MemberCluster, pools: tuple[str, ...]) -> dict:
    conditions = {condition.type: condition for condition in cluster.status.conditions}
    ready, reachable, certificate = (conditions.get(kind) for kind in (READY, REACHABLE, CERTIFICATE_READY))
    return {
        "name": cluster.metadata.name,
        "ready": ready.status if ready else "Unknown",
        "reason": ready.reason if ready else "",
        "message": ready.message if ready else "",
        "revoked": cluster.spec.revoked,
        "certificate": certificate.message if certificate else "",
        "reachable": reachable.status if reachable else "Unknown",
        "version": cluster.status.server_version,
        "link_mbps": cluster.spec.link.capacity_mbps,
        "datacenter": cluster.spec.datacenter,
        "pools": list(pools),
    }


MARKS: Final = {"ok": "ok", "warning": "WARNING", "failed": "FAILED"}


@app.command("check")
def check_members(
    name: Annotated[
        str | None, typer.Argument(help="MemberCluster to check; all if not given.", show_default=False)
    ] = None,
    hub_context: HubContext = None,
    hub_kubeconfig: HubKubeconfig = None,
    namespace: HubNamespace = "prfaas",
    output: TableOrJson = "table",
) -> None:
    """Check if members can be used; exit code 1 if not. Example: prfaas cluster check eu."""
    clusters = asyncio.run(check(KubeContext(hub_kubeconfig, hub_context, namespace), name))
    well = all(map(is_well, clusters.values()))
    if output == "json":
        found = {cluster: [finding._asdict() for finding in findings] for cluster, findings in clusters.items()}
        typer.echo(json.dumps({"well": well, "clusters": found}))
    else:
        table = Table("CLUSTER", "CHECK", "", "WHAT WAS FOUND", box=None)
        for cluster, findings in clusters.items():
            for finding in findings:
                table.add_row(cluster, finding.check, MARKS[finding.level], Text(finding.text))
        Console().print(table)
    raise typer.Exit(0 if well else 1)


@app.command("buyer")
def buyer(  # noqa: PLR0913, PLR0917  # a command line has one parameter a flag
    name: Annotated[str, typer.Argument(help="The buyer's name, which no other buyer has.")],
    out: Annotated[Path, typer.Option(help="Directory to write to; it is made if missing.")],
    hours: Annotated[int, typer.Option(min=1, max=720, help="How long the certificate is valid.")] = 24,
    force: Annotated[bool, typer.Option("--force", help="Replace existing files.")] = False,
    hub_context: HubContext = None,
    hub_kubeconfig: HubKubeconfig = None,
    namespace: HubNamespace = "prfaas",
) -> None:
    """Issue a buyer's certificate with the hub's authority, for who may have prompts prefilled and nothing else.

    Example: prfaas cluster buyer acme --out acme.
    """
    check_directory(out, buyers.FILES, force)  # a certificate that is recorded and lost would delay the next authority
    files = asyncio.run(buyers.sell(KubeContext(hub_kubeconfig, hub_context, namespace), name, timedelta(hours=hours)))
    write_files(out, files, force)


@app.command("revoke")
def revoke(
    name: Annotated[str, typer.Argument(help="Name of the MemberCluster, or buyer/NAME.")],
    hub_context: HubContext = None,
    hub_kubeconfig: HubKubeconfig = None,
    namespace: HubNamespace = "prfaas",
    wait_seconds: WaitSeconds = 30,
    output: TableOrJson = "table",
) -> None:
    """Cut a member cluster off at once: no prompt goes there, and its certificates are refused. Or those of a buyer.

    Example: prfaas cluster revoke eu.
    """
    hub = KubeContext(hub_kubeconfig, hub_context, namespace)
    if name.startswith(BUYER):
        is_known = asyncio.run(buyers.cut_off(hub, name.removeprefix(BUYER), wait_seconds))
        typer.echo(f"{name} is revoked: the hub refuses its certificates, and members do when they are reached")
        if not is_known:
            typer.echo("no certificate of this buyer was made here: look whether the name is right", err=True)
        return
    cluster, pools, routes_checked = asyncio.run(work.revoke(hub, name, wait_seconds))
    if not routes_checked:
        typer.echo("routing tables not checked: your account may not get ConfigMaps in the hub's namespace", err=True)
    facts = _facts(cluster, pools)
    if output == "json":
        typer.echo(json.dumps(facts))
        return
    typer.echo(f"{name} is revoked: {facts['certificate'] or 'no certificates are issued here'}")
    if pools:
        typer.echo(f"its pools {', '.join(pools)} get no prompt; `prfaas cluster join {name}` admits it again")


@app.command("leave")
def leave(  # noqa: PLR0913, PLR0917  # a command line has one parameter a flag
    name: Annotated[str, typer.Argument(help="Name of the MemberCluster.")],
    context: ContextOption = None,
    kubeconfig: KubeconfigOption = None,
    hub_context: HubContext = None,
    hub_kubeconfig: HubKubeconfig = None,
    namespace: HubNamespace = "prfaas",
    member_namespace: MemberNamespace = None,
    wait_seconds: WaitSeconds = 30,
) -> None:
    """Remove a member cluster from the hub, with --context also its account there. Example: prfaas cluster leave eu."""
    named = context is not None or kubeconfig is not None
    member = KubeContext(kubeconfig, context, member_namespace or namespace) if named else None
    asyncio.run(work.leave(KubeContext(hub_kubeconfig, hub_context, namespace), member, name, wait_seconds))
    typer.echo(f"{name} left")
