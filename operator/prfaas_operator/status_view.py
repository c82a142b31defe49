"""Draws `prfaas status`: both clusters, their pools, the links between them, the policies, and the problems.

All facts come from the status of the hub's objects; no member cluster, gateway or worker is asked. The output is a
drawing for a terminal, or plain lines without one.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from prfaas import names
from prfaas.api import Condition, MemberCluster, PrefillPool, PrfaaSPolicy
from prfaas.api.base import Resource
from prfaas_operator.plan.conditions import READY
from prfaas_operator.plan.member import users_of
from prfaas_operator.plan.pool_status import PoolObject, role_of

NOT_SEEN: Final = "NotSeenYet"
"""The cause shown for an object that no operator has reconciled."""


@dataclass(frozen=True)
class PoolView:
    """A pool: its ready and wanted instances, and the reason for missing ones."""

    kind: str
    name: str
    role: str
    cluster: str
    ready_replicas: int
    replicas: int
    is_ready: bool
    reason: str


@dataclass(frozen=True)
class ClusterSummary:
    """A cluster with its pools. A member also has its link to the hub and the time since its last answer."""

    name: str
    is_ready: bool
    reason: str
    version: str
    link_mbps: int | None
    link_percent: int | None
    contact_seconds: int | None
    pools: tuple[PoolView, ...]


@dataclass(frozen=True)
class PolicyView:
    """A policy: its model, and the length above which a prompt is offloaded."""

    name: str
    model: str
    is_ready: bool
    reason: str
    mode: str
    threshold_tokens: int | None
    bandwidth: str
    offloaded_percent: int | None
    link_percent: int | None
    ready_prefill: int
    ready_decode: int


@dataclass(frozen=True)
class FailingCondition:
    kind: str
    name: str
    condition: str
    reason: str
    message: str
    since: str


@dataclass(frozen=True)
class Overview:
    namespace: str
    clusters: tuple[ClusterSummary, ...]
    policies: tuple[PolicyView, ...]
    failing: tuple[FailingCondition, ...]


def overview(
    namespace: str,
    members: Sequence[MemberCluster],
    pools: Sequence[PoolObject],
    policies: Sequence[PrfaaSPolicy],
    now: datetime,
) -> Overview:
    """Sort the objects of a namespace into an overview: the hub first, then members by name."""
    members = sorted(members, key=_name)
    hub = ClusterSummary(names.HUB, True, "", "", None, None, None, _pools(pools, ""))
    everything: list[Resource] = [*policies, *members, *pools]
    return Overview(
        namespace,
        (hub, *(_member(member, pools, policies, now) for member in members)),
        tuple(_policy(policy) for policy in sorted(policies, key=_name)),
        tuple(each for one in everything for each in _failing(one)),
    )


def _name(one: Resource) -> str:
    return one.metadata.name


def _conditions(one: Resource) -> Sequence[Condition]:
    return one.status.conditions  # pyright: ignore[reportAttributeAccessIssue]  # every kind of ours has a status


def _readiness(one: Resource) -> tuple[bool, str]:
    ready = next((condition for condition in _conditions(one) if condition.type == READY), None)
    return (ready.status == "True", ready.reason) if ready else (False, NOT_SEEN)


def _pools(pools: Iterable[PoolObject], cluster: str) -> tuple[PoolView, ...]:
    return tuple(
        PoolView(
            pool.kind_name,
            pool.metadata.name,
            role_of(pool),
            cluster or names.HUB,
            pool.status.ready_replicas,
            pool.spec.replicas,
            *_readiness(pool),
        )
        for pool in sorted(pools, key=_name)
        if pool.spec.cluster_name == cluster
    )


def _member(
    member: MemberCluster, pools: Sequence[PoolObject], policies: Sequence[PrfaaSPolicy], now: datetime
) -> ClusterSummary:
    name, contact = member.metadata.name, member.status.last_contact_time
    here = users_of(name, [pool for pool in pools if isinstance(pool, PrefillPool)])
    through = [
        policy.status.link_utilisation_percent
        for policy in policies
        if set(here) & set(policy.spec.prefill_pools) and policy.status.link_utilisation_percent is not None
    ]
    return ClusterSummary(
        name,
        *_readiness(member),
        member.status.server_version,
        member.spec.link.capacity_mbps,
        max(through, default=None),
        max(0, round((now.astimezone(UTC) - datetime.fromisoformat(contact)).total_seconds())) if contact else None,
        _pools(pools, name),
    )


def _policy(policy: PrfaaSPolicy) -> PolicyView:
    status = policy.status
    return PolicyView(
        policy.metadata.name,
        policy.spec.model,
        *_readiness(policy),
        policy.spec.threshold.mode,
        status.threshold_tokens,
        status.bandwidth or "",
        status.offloaded_percent,
        status.link_utilisation_percent,
        status.ready_prefill,
        status.ready_decode,
    )


def _failing(one: Resource) -> Iterable[FailingCondition]:
    if not _conditions(one):
        message = "no operator has reconciled it; see `kubectl get deploy prfaas-operator`"
        yield FailingCondition(one.kind_name, one.metadata.name, READY, NOT_SEEN, message, "")
    shown: set[tuple[str, str]] = set()
    # Ready first: it repeats the words of the condition that it follows from, which is not shown again.
    for condition in sorted(_conditions(one), key=lambda condition: condition.type != READY):
        if condition.status == "False" and (condition.reason, condition.message) not in shown:
            shown.add((condition.reason, condition.message))
            what = (condition.type, condition.reason, condition.message, condition.last_transition_time)
            yield FailingCondition(one.kind_name, one.metadata.name, *what)


MAX_DOTS: Final = 16
BAR_CHARACTERS: Final = 20
BUSY_PERCENT: Final = 80
GOOD, BAD, DIM = "green", "red", "dim"


def drawn(view: Overview, title: str) -> RenderableType:
    return Group(
        Text(title, style="bold"),
        _draw_clusters(view),
        Text(""),
        *(_draw_policy(policy) for policy in view.policies),
        Text(""),
        _draw_failing(view.failing),
    )


def _draw_clusters(view: Overview) -> Table:
    """Return the hub on the left, and each member on the right behind its link."""
    grid = Table.grid(padding=(0, 1))
    hub, members = view.clusters[0], view.clusters[1:]
    if not members:
        grid.add_row(_draw_cluster(hub, "hub"))
        return grid
    for index, member in enumerate(members):
        left = _draw_cluster(hub, "hub") if index == 0 else Text("")
        subtitle = f"{member.name} · {member.version}" if member.version else member.name
        grid.add_row(left, _draw_link(member), _draw_cluster(member, subtitle))
    return grid


def _draw_cluster(cluster: ClusterSummary, title: str) -> Panel:
    table = Table.grid(padding=(0, 2))
    for pool in cluster.pools:
        table.add_row(pool.name, Text(pool.role, style=DIM), _draw_dots(pool), f"{pool.ready_replicas}/{pool.replicas}")
    if not cluster.pools:
        table.add_row(Text("no pools", style=DIM))
    content: list[RenderableType] = [table]
    if not cluster.is_ready:
        silent = "" if cluster.contact_seconds is None else f", last answer {age(cluster.contact_seconds)} ago"
        content.append(Text(f"{cluster.reason}{silent}", style=BAD))
    return Panel(
        Group(*content), title=title, title_align="left", border_style=GOOD if cluster.is_ready else BAD, expand=False
    )


def _draw_dots(pool: PoolView) -> Text:
    """Return a dot for each instance; a large pool shows a part of its dots, always with the missing ones."""
    wanted = max(pool.replicas, pool.ready_replicas)
    dots = min(wanted, MAX_DOTS)
    ready = pool.ready_replicas * dots // wanted if wanted else 0
    missing = dots - ready
    return Text.assemble(("●" * ready, GOOD), ("○" * missing, BAD))


def _draw_link(member: ClusterSummary) -> Text:
    percent = member.link_percent
    head = f"\n◀─ {member.link_mbps:,} Mbit/s ─▶\n"
    if percent is None:
        return Text(f"{head}not measured", style=DIM)
    filled = min(BAR_CHARACTERS, round(percent * BAR_CHARACTERS / 100))
    colour = BAD if percent >= BUSY_PERCENT else GOOD
    bar = (("█" * filled, colour), ("░" * (BAR_CHARACTERS - filled), DIM))
    return Text.assemble(head, *bar, f" {percent} %")


def _draw_policy(policy: PolicyView) -> Text:
    state = (" Ready", GOOD) if policy.is_ready else (f" {policy.reason}", BAD)
    return Text.assemble((policy.name, "bold"), state, f"  {policy_words(policy)}")


def policy_words(policy: PolicyView) -> str:
    words = [f"serves {policy.model}"]
    if policy.mode == "Disabled":
        words.append("offloads nothing")
    elif policy.threshold_tokens is None:
        words.append(f"threshold {policy.mode}, not known yet")
    else:
        words.append(f"offloads above {policy.threshold_tokens:,} tokens ({policy.mode})")
    if policy.offloaded_percent is not None:
        words.append(f"{policy.offloaded_percent} % offloaded")
    if policy.bandwidth:
        words.append(f"bandwidth {policy.bandwidth.lower()}")
    return ", ".join(words)


def _draw_failing(failing: tuple[FailingCondition, ...]) -> RenderableType:
    if not failing:
        return Text("Nothing is wrong.", style=GOOD)
    table = Table("WHAT", "WHY", "MORE", box=None, title="What is wrong", title_justify="left", title_style="bold red")
    for each in failing:
        table.add_row(f"{each.kind} {each.name}", Text(each.reason, style=BAD), Text(each.message))
    return table


def lines(view: Overview, title: str) -> Iterator[str]:
    """Yield an overview as plain text, one fact a line."""
    yield title
    for cluster in view.clusters:
        yield f"cluster {cluster.name}: {', '.join(_cluster_words(cluster))}"
        for pool in cluster.pools:
            why = "" if pool.is_ready else f" ({pool.reason})"
            yield f"  {pool.role} pool {pool.name}: {pool.ready_replicas} of {pool.replicas} ready{why}"
    for policy in view.policies:
        yield f"policy {policy.name}: {'Ready' if policy.is_ready else policy.reason}, {policy_words(policy)}"
    for each in view.failing:
        yield f"wrong: {each.kind} {each.name}: {each.reason}: {each.message}"
    if not view.failing:
        yield "nothing is wrong"


def _cluster_words(cluster: ClusterSummary) -> Iterator[str]:
    if cluster.link_mbps is None:
        yield "the hub"
        return
    yield "Ready" if cluster.is_ready else cluster.reason
    if cluster.version:
        yield cluster.version
    measured = "not measured" if cluster.link_percent is None else f"{cluster.link_percent} % used"
    yield f"link {cluster.link_mbps} Mbit/s {measured}"
    if cluster.contact_seconds is not None:
        yield f"last answer {age(cluster.contact_seconds)} ago"


def age(seconds: int) -> str:
    """Return a duration as kubectl does: 45s, 12m, 3h, 2d."""
    for unit, size in (("d", 86_400), ("h", 3600), ("m", 60)):
        if seconds >= 2 * size:
            return f"{seconds // size}{unit}"
    return f"{seconds}s"
