"""What `prfaas cluster check` makes of what it saw: a finding a question, and whether all is well.

`failed` is what keeps pools from running; `warning` is what works now and needs a look, or could not be seen from here.
"""

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, Final, Literal, NamedTuple

from prfaas.api import Condition, MemberCluster
from prfaas_operator.plan.conditions import READY, rfc3339
from prfaas_operator.plan.tokens import TokenFacts, has_expired

Level = Literal["ok", "warning", "failed"]
OLDEST_MINOR: Final = 29
"""Of Kubernetes 1.x; as the charts say in kubeVersion."""
SKEW_WARNING: Final = timedelta(seconds=5)
SKEW_FAILED: Final = timedelta(seconds=60)
CONTACT_WARNING: Final = timedelta(minutes=3)
"""The status moves once a minute at most."""


class Finding(NamedTuple):
    """The answer to one question."""

    check: str
    level: Level
    message: str


def is_well(findings: Iterable[Finding]) -> bool:
    """Tell whether nothing failed."""
    return all(finding.level != "failed" for finding in findings)


def operators_view(member: MemberCluster) -> Finding:
    """Return what the operator last wrote about a member."""
    ready = next((one for one in member.status.conditions if one.type == READY), None)
    if ready is None:
        return Finding("operator", "failed", "no operator has looked at it; see `kubectl get deploy prfaas-operator`")
    return Finding("operator", "ok" if ready.status == "True" else "failed", f"{ready.reason}: {ready.message}")


def last_contact(member: MemberCluster, now: datetime) -> Finding:
    """Return how long ago the operator was last answered."""
    contact = member.status.last_contact_time
    if contact is None:
        return Finding("last contact", "failed", "the operator has never been answered")
    age = now - datetime.fromisoformat(contact)
    level: Level = "warning" if age > CONTACT_WARNING else "ok"
    return Finding("last contact", level, f"{contact}, {age.total_seconds():.0f} s ago")


def token(facts: TokenFacts | None, name: str, now: datetime) -> Finding:
    """Return how long a member's token still lasts."""
    if facts is None:
        return Finding("token", "ok", "the credential has no end of its own")
    until = f"until {rfc3339(facts.expires_at)}"
    if has_expired(facts, now):
        return Finding("token", "failed", f"ended, it was valid {until}; run `prfaas cluster join {name}` again")
    left, whole = facts.expires_at - now, facts.lifetime
    says = f"valid {until}, granted for {whole.total_seconds() / 86_400:.1f} days; outlives an outage of {_span(left)}"
    if left < whole / 3:
        return Finding("token", "warning", f"{says}, but should have been renewed; see the Events of the MemberCluster")
    return Finding("token", "ok", says)


def _span(left: timedelta) -> str:
    return f"{left.days} days" if left.days else f"{left.total_seconds() / 3600:.1f} hours"


def version(text: str) -> Finding:
    """Return whether a server is new enough, from its gitVersion such as v1.34.4-eks-1a2b3c4."""
    numbers = text.removeprefix("v").split(".")
    known = len(numbers) > 1 and numbers[0] == "1" and numbers[1].rstrip("+").isdigit()
    if not known:
        return Finding("version", "warning", f"{text!r} is no version that this command knows")
    old = int(numbers[1].rstrip("+")) < OLDEST_MINOR
    return Finding("version", "failed" if old else "ok", f"{text}{f', 1.{OLDEST_MINOR} is needed' if old else ''}")


def clock(hub: datetime, member: datetime) -> Finding:
    """Return how far the clocks of the two API servers are apart; answers tell whole seconds."""
    apart = abs(hub - member)
    level: Level = "failed" if apart > SKEW_FAILED else "warning" if apart > SKEW_WARNING else "ok"
    advice = "" if level == "ok" else "; certificates and tokens depend on clocks that agree: see NTP on the nodes"
    return Finding("clock", level, f"{apart.total_seconds():.0f} s between hub and member{advice}")


def rights(asked: Mapping[str, bool]) -> Finding:
    """Return which rights are missing, of those asked for as `VERB RESOURCE`."""
    missing = sorted(right for right, granted in asked.items() if not granted)
    if missing:
        advice = "`prfaas cluster join` again, or upgrade the chart prfaas-member"
        return Finding("rights", "failed", f"missing: {', '.join(missing)}; {advice}")
    return Finding("rights", "ok", f"all {len(asked)} granted: {', '.join(sorted(asked))}")


def data_path(links: Sequence[Condition], reached: Mapping[str, bool]) -> Finding:
    """Return whether the data path works: as the schedulers see it, which is what counts, and from here.

    Args:
        links: the conditions LinkHealthy of the policies that use pools of the cluster.
        reached: instances by `HOST:PORT`, and whether a connection from here came about.

    """
    broken = [link for link in links if link.status == "False"]
    if broken:
        return Finding("data path", "failed", f"{broken[0].reason}: {broken[0].message}")
    here = f"{sum(reached.values())} of {len(reached)} instances reached from here" if reached else "no instance yet"
    if any(link.status == "True" for link in links):
        return Finding("data path", "ok", f"the scheduler measures it and finds it healthy; {here}")
    level: Level = "ok" if reached and all(reached.values()) else "warning"
    return Finding("data path", level, f"no scheduler has measured it; {here}")


def crd_skew(kind: str, wanted: Mapping[str, Any], live: Mapping[str, Any] | None) -> Finding:
    """Compare the hub's CRD with the one of this version, by the fields that each knows."""
    check = f"CRD {kind}"
    if live is None:
        return Finding(check, "failed", "is not installed; install the chart prfaas, or crds/")
    ours, theirs = _fields(wanted), _fields(live)
    if missing := sorted(ours - theirs):
        what = f"lacks {', '.join(missing[:3])}{' and more' if len(missing) > 3 else ''}"
        return Finding(check, "failed", f"is older than this version: {what}; apply crds/ of this version")
    if more := sorted(theirs - ours):
        return Finding(
            check, "warning", f"is newer than this version: knows {', '.join(more[:3])}; upgrade this command"
        )
    return Finding(check, "ok", f"has all {len(ours)} fields of this version")


def _fields(crd: Mapping[str, Any]) -> set[str]:
    (served,) = [one for one in crd["spec"]["versions"] if one["storage"]]
    return set(_paths(served["schema"]["openAPIV3Schema"], ""))


def _paths(schema: Mapping[str, Any], path: str) -> Iterable[str]:
    for name, below in (schema.get("properties") or {}).items():
        yield f"{path}.{name}"
        yield from _paths(below, f"{path}.{name}")
    for inner in ("items", "additionalProperties"):
        if isinstance(schema.get(inner), Mapping):
            yield from _paths(schema[inner], f"{path}[]")
