"""Turns facts into findings: a value, a verdict, and one sentence that says how to cure what is not well. Pure."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from prfaas import names
from prfaas.engines import ENGINES
from prfaas_operator.check import Finding, Level, clock_finding, version_finding
from prfaas_operator.preflight.facts import ADMISSION_KINDS, Accelerators, Admission, ClusterFacts, PathFacts, Scrape

REQUIRED_PORTS: Final = (names.WORKER_API_PORT, names.WORKER_DATA_PORT)
SLOW_SCRAPE_SECONDS: Final = 5.0
STALE_INTERVALS: Final = 6
MOST_STALE_SECONDS: Final = 3600
"""The most that a policy may say."""
"""Scrapes that may be missing before a policy calls its metrics stale, as docs/operate/metrics.md advises."""
GIB: Final = 1 << 30
ONE_OF_FOUR: Final = 0.5
"""A single connection that carries less of what four carry is held back by its own window, or by loss."""
SECONDS: Final = {"ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800, "y": 31_536_000}


def engine_ports() -> dict[int, list[str]]:
    """Return the ports that only some engines need, the first of each range, and these engines."""
    found: dict[int, list[str]] = {}
    for engine in ENGINES.values():
        for ports in engine.all_ports:
            found.setdefault(ports.first, []).append(engine.name)
    return dict(sorted(found.items()))


def of_cluster(facts: ClusterFacts, *, has_prometheus: bool) -> Iterator[Finding]:
    """Yield the findings about one cluster; `has_prometheus` says that a person named one."""
    yield version_finding(facts.probe.version)
    yield clock_finding(facts.probe.date, facts.probe.at, "from this machine")
    yield from _rights(facts.rights)
    yield _accelerators(facts.accelerators)
    yield _pod_monitors(facts.has_pod_monitors, has_prometheus=has_prometheus)


def of_both(hub: ClusterFacts, member: ClusterFacts) -> Finding:
    """Return the difference of the clusters' clocks. They were asked at different times, which this machine knows."""
    return clock_finding(hub.probe.date, member.probe.date - (member.probe.at - hub.probe.at))


def of_admission(found: Admission) -> Finding:
    """Return whether the pods of prfaas will be admitted."""
    standard = f"the namespace enforces {found.enforced or 'no standard'}"
    if found.refusal:
        cure = "admit pods of the restricted standard, without privileges and with a read-only root"
        return Finding("pod security", "failed", f"{standard}, and a restricted pod is refused: {found.refusal}", cure)
    return Finding("pod security", "ok", f"{standard}; a restricted pod is admitted")


def of_path(path: PathFacts, server: str) -> Iterator[Finding]:
    """Yield the findings about the path from the hub's pods to the member's pods, and to its API server `server`."""
    yield _api(path.api, server)
    if path.prometheus is not None:
        yield _scrape(path.prometheus)
    yield from _ports(path.ports)
    if not any(state == "open" for state in path.ports.values()):
        return
    if path.hub_address:
        text = (
            f"the member sees {path.hub_address}: name its range in networkPolicy.hubCidrs of the chart prfaas-member"
        )
        yield Finding("hub's address", "ok", text)
    yield _packets(path)
    if path.round_trip_seconds is None:
        yield Finding("round trip", "failed", "no byte came back", "look for loss on the path")
    else:
        yield Finding("round trip", "ok", f"{path.round_trip_seconds * 1000:.3g} ms")
    yield _rate(path.mbps)


def _rights(rights: Mapping[str, bool]) -> Iterator[Finding]:
    missing = {right for right, granted in rights.items() if not granted}
    spared = {f"create {kind.plural}" for kind in ADMISSION_KINDS}
    if needed := sorted(missing - spared):
        cure = "install as an account with these rights, or have them granted"
        yield Finding("rights", "failed", f"missing: {', '.join(needed)}", cure)
    else:
        yield Finding("rights", "ok", f"all {len(rights.keys() - missing)} that an installation takes")
    if without := sorted(missing & spared):
        cure = "have them granted, or set admission.enabled=false of the chart prfaas-member"
        yield Finding("admission rights", "warning", f"missing: {', '.join(without)}", cure)


def _accelerators(found: Sequence[Accelerators] | None) -> Finding:
    if found is None:
        return Finding("accelerators", "warning", "your account may not list nodes", "ask one that may")
    if not found:
        cure = "install the vendor's device plugin; CPUs serve only small models"
        return Finding("accelerators", "warning", "no node has an allocatable nvidia.com/gpu or amd.com/gpu", cure)
    text = ", ".join(
        f"{one.devices} x {one.product or one.resource}"
        + (f" of {one.memory_bytes / GIB:.0f} GiB" if one.memory_bytes else "")
        + f" on {len(one.nodes)} node{'s' if len(one.nodes) > 1 else ''}"
        for one in found
    )
    if all(one.product for one in found):
        return Finding("accelerators", "ok", text)
    cure = "install GPU feature discovery, which labels nodes with nvidia.com/gpu.product and nvidia.com/gpu.memory"
    return Finding("accelerators", "warning", text, cure)


def _pod_monitors(is_served: bool, *, has_prometheus: bool) -> Finding:
    if is_served:
        return Finding("monitoring", "ok", "PodMonitors are served: set monitoring.podMonitor.enabled of the chart")
    cure = "give your Prometheus by --prometheus, and let it scrape as docs/operate/metrics.md says"
    level: Level = "ok" if has_prometheus else "warning"
    return Finding("monitoring", level, "no Prometheus operator", "" if has_prometheus else cure)


def _api(state: str, server: str) -> Finding:
    if state == "open":
        return Finding("API server", "ok", f"the hub's pods reach {server}")
    cure = "open it for the hub's pods, or name by --server the address that they reach, here and at `cluster join`"
    return Finding("API server", "failed", f"{server}, from the hub's pods: {state}", cure)


def _scrape(found: Scrape) -> Finding:
    if found.failure:
        cure = "give the URL by which the hub's pods reach it, and let its NetworkPolicy admit them"
        return Finding("Prometheus", "failed", f"does not answer the hub's pods: {found.failure}", cure)
    seconds = seconds_of(found.interval)
    text = f"scrapes every {found.interval} by default"
    if seconds <= SLOW_SCRAPE_SECONDS:
        return Finding("Prometheus", "ok", text)
    cure = (
        "scrape prfaas's pods each second (monitoring.podMonitor.interval), or set metrics.staleAfterSeconds to "
        f"{stale_seconds(found)} or more and a window of {3 * seconds:.0f} s in utilisationQuery"
    )
    return Finding("Prometheus", "warning", text, cure)


def seconds_of(duration: str) -> float:
    """Return the seconds of a duration as Prometheus writes it, such as 1m30s."""
    return sum(int(number) * SECONDS[unit] for number, unit in re.findall(r"(\d+)(ms|[smhdwy])", duration))


def stale_seconds(found: Scrape | None) -> int | None:
    """Return what a policy needs for staleAfterSeconds; None where its default will do."""
    seconds = seconds_of(found.interval) if found else 0.0
    return min(MOST_STALE_SECONDS, round(STALE_INTERVALS * seconds)) if seconds > SLOW_SCRAPE_SECONDS else None


def _ports(states: Mapping[str, str]) -> Iterator[Finding]:
    is_shut = not any(state in {"open", "refused"} for state in states.values())
    for port in REQUIRED_PORTS:
        state = states.get(str(port), "not tried")
        cure = f"open TCP {port} from the hub's pods to the member's pods in firewalls and NetworkPolicies"
        if state == "stranger":
            cure = "let the pods' addresses of both clusters not overlap, or join the member with --addressing HostIP"
        elif is_shut:
            cure = "route the member's pods' addresses from the hub's pods, or join the member with --addressing HostIP"
        text = "another program answers at the member's address" if state == "stranger" else state
        yield Finding(f"port {port}", "ok" if state == "open" else "failed", text, "" if state == "open" else cure)
    others = {port: engines for port, engines in engine_ports().items() if str(port) in states}
    shut = [port for port in others if states[str(port)] != "open"]
    if not shut:
        yield Finding("engines' ports", "ok", f"{', '.join(map(str, others))} are open")
    elif not is_shut:
        needed_by = "; ".join(f"{port} for {', '.join(others[port])}" for port in shut)
        text = ", ".join(f"{port} {states[str(port)]}" for port in shut)
        yield Finding("engines' ports", "warning", text, f"open those of the engines that you use: {needed_by}")


def _packets(path: PathFacts) -> Finding:
    if not path.lost:
        return Finding("MTU", "ok", f"packets of {path.packet_bytes} bytes cross both ways")
    if not path.packet_bytes:
        return Finding("MTU", "failed", f"no packets cross from {path.lost}", "look for loss, or a proxy, on the path")
    cure = (
        "let ICMP `fragmentation needed` (IPv6: `packet too big`) pass, or set the MTU of both clusters' pods to "
        f"{path.packet_bytes}"
    )
    text = f"packets above {path.packet_bytes} bytes vanish from {path.lost}; {path.sent_bytes} are sent"
    return Finding("MTU", "failed", text, cure)


def _rate(mbps: Mapping[str, float]) -> Finding:
    one, four = mbps.get("1", 0.0), mbps.get("4", 0.0)
    text = f"{one:,.0f} by 1 connection, {four:,.0f} by 4, from member to hub"
    if not max(one, four):
        return Finding("Mbit/s", "failed", text, "look for loss or a proxy on the path")
    if one < ONE_OF_FOUR * four:
        cure = "look for loss, or raise the last figure of net.ipv4.tcp_wmem in the member and tcp_rmem in the hub"
        return Finding("Mbit/s", "warning", text, cure)
    return Finding("Mbit/s", "ok", text)
