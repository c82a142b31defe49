"""`prfaas preflight`: what two clusters and the path between them are fit for, before anything is installed."""

import asyncio
import secrets
from contextlib import AsyncExitStack
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, Final
from urllib.parse import urlsplit

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from prfaas.console import TableOrJson, echo_json, new_app
from prfaas.errors import ConfigError, PrfaasError
from prfaas.ports import url_host
from prfaas_operator.check import Finding, is_well
from prfaas_operator.clusters.client import ClusterClient
from prfaas_operator.clusters.connect import KubeContext, open_context
from prfaas_operator.preflight import findings, jobs, proposal
from prfaas_operator.preflight.facts import ClusterFacts, PathFacts
from prfaas_operator.preflight.look import admission, look, rights_of_hub, rights_of_member

MARKS: Final = {"ok": "ok", "warning": "warn", "failed": "FAIL"}
HUB, MEMBER, PATH = "hub", "member", "path"
WIDTH: Final = 120

app = new_app()


class Seen:
    """What was found, and the facts behind it as far as they could be read."""

    def __init__(self) -> None:
        self.findings: dict[str, list[Finding]] = {HUB: [], MEMBER: [], PATH: []}
        self.clusters: dict[str, ClusterFacts] = {}
        self.path: PathFacts | None = None

    def failed(self, where: str, check: str, error: PrfaasError, cure: str) -> None:
        self.findings[where].append(Finding(check, "failed", str(error), cure))


@app.command()
def preflight(  # noqa: PLR0913, PLR0917  # a command line has one parameter a flag
    hub: Annotated[str, typer.Option(help="Kubeconfig context of the hub.")],
    member: Annotated[str, typer.Option(help="Kubeconfig context of the member cluster.")],
    prometheus: Annotated[
        str | None, typer.Option(help="URL of your Prometheus as the hub's pods reach it.", show_default=False)
    ] = None,
    server: Annotated[
        str | None, typer.Option(help="Address of the member's API server as the hub reaches it, if not the context's.")
    ] = None,
    namespace: Annotated[
        str | None, typer.Option("--namespace", "-n", help="Namespace of both for the probes; a new one if not given.")
    ] = None,
    image: Annotated[
        str, typer.Option(help="Image of the probes, which both clusters pull; any with Python 3.11 will do.")
    ] = f"prfaas/operator:{version('prfaas')}",
    wait_seconds: Annotated[float, typer.Option(min=0, max=3600, help="Longest wait for each probe to start.")] = 120,
    save: Annotated[
        Path | None, typer.Option(help="Write the file for kubectl apply here; printed if not given.")
    ] = None,
    output: TableOrJson = "table",
) -> None:
    """Check two clusters before an installation. Example: prfaas preflight --hub a --member b.

    The exit code is 1 if an installation would fail. Two Jobs measure the path for half a minute. They need no rights,
    and nothing of them stays.
    """
    _check_names(hub, member, prometheus)
    order = jobs.Order(secrets.token_hex(8), image, "", prometheus, wait_seconds)
    seen = asyncio.run(_inspect((hub, member), server, namespace, order))
    well = all(map(is_well, seen.findings.values()))
    next_step = _proposal(seen, hub, member, server, prometheus)
    if save is not None and next_step["file"]:
        _write(save, next_step["file"])
    if output == "json":
        found = {where: [finding._asdict() for finding in some] for where, some in seen.findings.items()}
        echo_json({"well": well, "findings": found, "path": seen.path, **next_step})
    else:
        _show(seen, next_step, save)
    raise typer.Exit(0 if well else 1)


def _say(line: str) -> None:
    typer.echo(line, err=True)


async def _inspect(contexts: tuple[str, str], server: str | None, namespace: str | None, order: jobs.Order) -> Seen:
    seen, room = Seen(), namespace or f"{jobs.NAME}-{order.token}"
    hub, member = (KubeContext(None, context, room) for context in contexts)
    async with open_context(hub) as here, open_context(member) as there, AsyncExitStack() as rooms:
        sides = {HUB: here, MEMBER: there}
        address = _address(here, there, server)
        rights = {HUB: rights_of_hub(), MEMBER: rights_of_member(room)}
        await asyncio.gather(
            *(_look(seen, where, sides[where], rights[where], order.prometheus is not None) for where in sides)
        )
        if len(seen.clusters) == len(sides):
            seen.findings[PATH].append(findings.of_both(seen.clusters[HUB], seen.clusters[MEMBER]))
        admitted = [
            await _enter(seen, where, sides[where], order, rooms, is_given=namespace is not None)
            for where in seen.clusters
        ]
        if len(admitted) == len(sides) and all(admitted):
            await _measure(seen, here, there, order._replace(server=address))
    return seen


def _address(hub: ClusterClient, member: ClusterClient, server: str | None) -> str:
    """Return HOST:PORT of the member's API server; raises ConfigError where there is one cluster only."""
    urls = [cluster.session.configuration.host for cluster in (hub, member)]
    if urls[0] == urls[1]:
        raise ConfigError(f"--hub and --member lead to the same cluster, {urls[0]}; name contexts of two")
    try:
        url = urlsplit(server or urls[1])
        host, port = url.hostname, url.port
    except ValueError:  # a port that is no number, half an IPv6 address
        host, port = None, None
    if not host:
        raise ConfigError(f"--server is {server!r}, which is no address; give one such as https://10.0.0.1:6443")
    return f"{url_host(host)}:{port or 443}"


def _check_names(hub: str, member: str, prometheus: str | None) -> None:
    """Refuse what the proposed file could not hold, and a Prometheus that is no URL or has a password."""
    if not (hub.isprintable() and member.isprintable()):
        raise ConfigError("--hub and --member must be printable; see `kubectl config get-contexts`")
    if prometheus is None:
        return
    try:
        url = urlsplit(prometheus)
        is_url = url.scheme in {"http", "https"} and bool(url.hostname) and url.port != 0 and "@" not in url.netloc
    except ValueError:
        is_url = False
    if not (is_url and prometheus.isprintable()):
        example = "http://prometheus.monitoring.svc:9090"
        raise ConfigError(f"--prometheus is {prometheus.rpartition('@')[2]!r}; give a URL without a key: {example}")


async def _look(seen: Seen, where: str, cluster: ClusterClient, rights: list[Any], has_prometheus: bool) -> None:
    try:
        facts = await look(cluster, rights)
    except PrfaasError as error:
        seen.failed(where, "API server", error, "see `kubectl get nodes` with the same context, as an administrator")
        return
    seen.clusters[where] = facts
    seen.findings[where] += findings.of_cluster(facts, has_prometheus=has_prometheus)


async def _enter(
    seen: Seen, where: str, cluster: ClusterClient, order: jobs.Order, rooms: AsyncExitStack, *, is_given: bool
) -> bool:
    """Have a namespace in a cluster; return whether it admits the probes."""
    try:
        await rooms.enter_async_context(jobs.room(cluster, is_given=is_given, say=_say))
        found = await admission(cluster, jobs.trial(order))
    except PrfaasError as error:
        seen.failed(where, "namespace", error, "name one by --namespace in which you may create Jobs")
        return False
    seen.findings[where].append(findings.of_admission(found))
    return not found.refusal


async def _measure(seen: Seen, hub: ClusterClient, member: ClusterClient, order: jobs.Order) -> None:
    _say("measuring the path, about half a minute from when the probes run")
    try:
        seen.path = await jobs.measure(hub, member, order)
    except PrfaasError as error:
        seen.failed(PATH, "probe", error, "give an --image that both clusters pull, and room for a small pod")
        return
    seen.findings[PATH] += findings.of_path(seen.path, order.server)


def _proposal(seen: Seen, hub: str, member: str, server: str | None, prometheus: str | None) -> dict[str, Any]:
    """Return the file, the plan that it follows, and the planner's sentence or what is missing for one."""
    nothing = {"file": None, "plan": None, "expectation": "nothing is proposed: cure what failed first"}
    if seen.path is None or not seen.path.best_mbps:
        return nothing
    found = proposal.expect(seen.clusters[HUB].accelerators, seen.clusters[MEMBER].accelerators, seen.path)
    planned = None if isinstance(found, str) else found
    target = proposal.Target(hub, member, server, prometheus, seen.path)
    return {
        "file": proposal.manifests(target, planned),
        "plan": planned.document if planned else None,
        "expectation": planned.sentence if planned else f"no figures: {found}",
    }


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text)
    except OSError as error:
        raise ConfigError(f"--save {path} cannot be written: {error}") from error


def _show(seen: Seen, next_step: dict[str, Any], save: Path | None) -> None:
    console = Console(width=WIDTH, highlight=False, markup=False, emoji=False)
    table = Table("WHERE", "CHECK", "FOUND", "VERDICT", box=None)
    for where, some in seen.findings.items():
        for one in some:
            cure = f": {one.cure}" if one.cure else ""
            table.add_row(where, one.check, Text(one.message), Text(f"{MARKS[one.level]}{cure}"))
    console.print(table)
    if next_step["file"] and save is None:
        console.print()
        typer.echo(next_step["file"], nl=False)
    console.print()
    if next_step["file"] and save is not None:
        console.print(f"{save} is for `kubectl apply`; its head says what comes before.")
    console.print(Text(f"What to expect: {next_step['expectation']}"))
