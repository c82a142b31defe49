"""How an overview looks: drawn for a terminal, or as plain lines where there is none."""

from collections.abc import Iterator
from typing import Final

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from prfaas_operator.plan.overview import ClusterView, Overview, PolicyView, PoolView, Trouble

MAX_DOTS: Final = 16
BAR_CHARACTERS: Final = 20
BUSY_PERCENT: Final = 80
GOOD, BAD, DIM = "green", "red", "dim"


def drawn(view: Overview, title: str) -> RenderableType:
    """Return an overview as rich draws it."""
    return Group(
        Text(title, style="bold"),
        _clusters(view),
        Text(""),
        *(_policy(policy) for policy in view.policies),
        Text(""),
        _troubles(view.troubles),
    )


def _clusters(view: Overview) -> Table:
    """Return the hub on the left, and each member on the right behind its link."""
    grid = Table.grid(padding=(0, 1))
    hub, members = view.clusters[0], view.clusters[1:]
    if not members:
        grid.add_row(_cluster(hub, "hub"))
        return grid
    for index, member in enumerate(members):
        left = _cluster(hub, "hub") if index == 0 else Text("")
        subtitle = f"{member.name} · {member.version}" if member.version else member.name
        grid.add_row(left, _link(member), _cluster(member, subtitle))
    return grid


def _cluster(cluster: ClusterView, title: str) -> Panel:
    table = Table.grid(padding=(0, 2))
    for pool in cluster.pools:
        table.add_row(pool.name, Text(pool.role, style=DIM), _dots(pool), f"{pool.ready_replicas}/{pool.replicas}")
    if not cluster.pools:
        table.add_row(Text("no pools", style=DIM))
    content: list[RenderableType] = [table]
    if not cluster.is_ready:
        silent = "" if cluster.contact_seconds is None else f", last answer {age(cluster.contact_seconds)} ago"
        content.append(Text(f"{cluster.reason}{silent}", style=BAD))
    return Panel(
        Group(*content), title=title, title_align="left", border_style=GOOD if cluster.is_ready else BAD, expand=False
    )


def _dots(pool: PoolView) -> Text:
    """Return a dot an instance; of a large pool a part of them, among which one that is missing is never lost."""
    wanted = max(pool.replicas, pool.ready_replicas)
    dots = min(wanted, MAX_DOTS)
    ready = pool.ready_replicas * dots // wanted if wanted else 0
    missing = dots - ready
    return Text.assemble(("●" * ready, GOOD), ("○" * missing, BAD))


def _link(member: ClusterView) -> Text:
    percent = member.link_percent
    head = f"\n◀─ {member.link_mbps:,} Mbit/s ─▶\n"
    if percent is None:
        return Text(f"{head}not measured", style=DIM)
    filled = min(BAR_CHARACTERS, round(percent * BAR_CHARACTERS / 100))
    colour = BAD if percent >= BUSY_PERCENT else GOOD
    bar = (("█" * filled, colour), ("░" * (BAR_CHARACTERS - filled), DIM))
    return Text.assemble(head, *bar, f" {percent} %")


def _policy(policy: PolicyView) -> Text:
    state = (" Ready", GOOD) if policy.is_ready else (f" {policy.reason}", BAD)
    return Text.assemble((policy.name, "bold"), state, f"  {policy_words(policy)}")


def policy_words(policy: PolicyView) -> str:
    """Return what a policy does, in a line."""
    words = [f"serves {policy.model}"]
    if policy.mode == "Disabled":
        words.append("offloads nothing")
    elif policy.threshold_tokens is None:
        words.append(f"threshold {policy.mode}, not told yet")
    else:
        words.append(f"offloads beyond {policy.threshold_tokens:,} tokens ({policy.mode})")
    if policy.offloaded_percent is not None:
        words.append(f"{policy.offloaded_percent} % offloaded")
    if policy.bandwidth:
        words.append(f"bandwidth {policy.bandwidth.lower()}")
    return ", ".join(words)


def _troubles(troubles: tuple[Trouble, ...]) -> RenderableType:
    if not troubles:
        return Text("Nothing is wrong.", style=GOOD)
    table = Table("WHAT", "WHY", "MORE", box=None, title="What is wrong", title_justify="left", title_style="bold red")
    for each in troubles:
        table.add_row(f"{each.kind} {each.name}", Text(each.reason, style=BAD), Text(each.message))
    return table


def lines(view: Overview, title: str) -> Iterator[str]:
    """Yield an overview as plain text, a fact a line."""
    yield title
    for cluster in view.clusters:
        yield f"cluster {cluster.name}: {', '.join(_cluster_words(cluster))}"
        for pool in cluster.pools:
            why = "" if pool.is_ready else f" ({pool.reason})"
            yield f"  {pool.role} pool {pool.name}: {pool.ready_replicas} of {pool.replicas} ready{why}"
    for policy in view.policies:
        yield f"policy {policy.name}: {'Ready' if policy.is_ready else policy.reason}, {policy_words(policy)}"
    for each in view.troubles:
        yield f"wrong: {each.kind} {each.name}: {each.reason}: {each.message}"
    if not view.troubles:
        yield "nothing is wrong"


def _cluster_words(cluster: ClusterView) -> Iterator[str]:
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
