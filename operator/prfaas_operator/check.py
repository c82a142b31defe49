"""Checks a member cluster for `prfaas cluster check`: asks the hub, and the member with the credentials in the hub."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final, Literal, NamedTuple
from urllib.parse import urlsplit

from prfaas import names
from prfaas.api import KINDS, Condition, MemberCluster, PrefillPool, PrfaaSPolicy, crd
from prfaas.conditions import rfc3339
from prfaas.errors import ConfigError, PrfaasError
from prfaas_operator.clusters import kinds
from prfaas_operator.clusters.client import ClusterClient
from prfaas_operator.clusters.connect import KubeContext, connect_member, open_context
from prfaas_operator.clusters.kinds import Object
from prfaas_operator.plan.conditions import REACHABLE, READY
from prfaas_operator.plan.credentials import Access, TokenFacts, has_expired, read_token
from prfaas_operator.plan.member import users_of
from prfaas_operator.plan.reading import read
from prfaas_operator.reconcile.members import access_from
from prfaas_operator.render import service_account
from prfaas_operator.render.gateway import read_config_map

LINK_HEALTHY: Final = "LinkHealthy"
CONNECT_SECONDS: Final = 3.0
MOST_INSTANCES: Final = 16


Level = Literal["ok", "warning", "failed"]
OLDEST_MINOR: Final = 29
"""Of Kubernetes 1.x; as the charts say in kubeVersion."""
SKEW_WARNING: Final = timedelta(seconds=5)
SKEW_FAILED: Final = timedelta(seconds=60)
CONTACT_WARNING: Final = timedelta(minutes=3)
"""The status moves once a minute at most."""


class Finding(NamedTuple):
    """What a check found; `cure` says what to do about it, where the message does not."""

    check: str
    level: Level
    message: str
    cure: str = ""

    @property
    def text(self) -> str:
        return f"{self.message}; {self.cure}" if self.cure else self.message


class Probe(NamedTuple):
    """An answer to the cheapest call: the server's version, its clock and this machine's then, and its duration."""

    version: str
    date: datetime
    at: datetime
    seconds: float


async def check(hub: KubeContext, name: str | None) -> dict[str, list[Finding]]:
    """Check the hub, and one member or all; return the findings by cluster.

    Raises ConfigError: there is no such MemberCluster, or the hub refuses what a check has to read.
    """
    async with open_context(hub) as here:
        found = [read(MemberCluster, one) for one in await here.list_all(kinds.MEMBER_CLUSTER)]
        chosen = [member for member in found if name in (None, member.metadata.name)]
        if name is not None and not chosen:
            known = ", ".join(member.metadata.name for member in found) or "none"
            raise ConfigError(f"MemberCluster {name} does not exist in namespace {hub.namespace} (there are: {known})")
        hub_probe = await probe_server(here)
        findings = {names.HUB: [one async for one in _crds(here)]}
        for member in chosen:
            findings[member.metadata.name] = [one async for one in _member(here, hub_probe, member)]
        return findings


async def probe_server(cluster: ClusterClient) -> Probe:
    """Make the cheapest call."""
    started = time.monotonic()
    version = await cluster.version()
    return Probe(version, cluster.now(), datetime.now(UTC), time.monotonic() - started)


async def _crds(hub: ClusterClient) -> AsyncIterator[Finding]:
    for kind in KINDS:
        wanted = crd.crd(kind)
        try:
            yield crd_skew(kind.kind_name, wanted, await hub.get(kinds.CUSTOM_RESOURCE, wanted["metadata"]["name"]))
        except PrfaasError as error:
            yield Finding(f"CRD {kind.kind_name}", "warning", f"cannot be read with your rights: {error}")


async def _member(hub: ClusterClient, hub_probe: Probe, member: MemberCluster) -> AsyncIterator[Finding]:
    now = hub.now()
    yield operators_view(member)
    yield last_contact(member, now)
    secret_name = member.spec.kubeconfig_secret_ref.name
    try:
        access = access_from(member, await hub.get(kinds.SECRET, secret_name))
    except PrfaasError as error:
        yield Finding("kubeconfig", "failed", str(error))
        return
    yield Finding("kubeconfig", "ok", f"Secret {secret_name} is accepted, for {access.server}")
    yield token_finding(read_token(access.token), member.metadata.name, now)
    async for finding in _with_credentials(hub_probe, member, access):
        yield finding
    pools = [read(PrefillPool, pool) for pool in await hub.list_all(kinds.PREFILL_POOL)]
    if users := users_of(member.metadata.name, pools):
        yield await _data_path(hub, member.metadata.name, users)


async def _with_credentials(hub_probe: Probe, member: MemberCluster, access: Access) -> AsyncIterator[Finding]:
    """Ask the member's API server from this machine, with the operator's credentials."""
    try:
        there = await connect_member(member.metadata.name, member.spec.namespace, access)
    except PrfaasError as error:
        yield Finding("kubeconfig", "failed", str(error))
        return
    try:
        probe = await probe_server(there)
        yield Finding("from here", "ok", f"answered in {probe.seconds * 1000:.0f} ms")
        yield version_finding(probe.version)
        # The hub was asked earlier: the time in between is no difference of clocks.
        yield clock_finding(hub_probe.date, probe.date - (probe.at - hub_probe.at))
        (role,) = [one for one in service_account.member_account(there.namespace) if one["kind"] == kinds.ROLE.name]
        yield rights_finding(await granted(there, role["rules"]))
        yield await _namespace(there)
    except PrfaasError as error:
        yield _not_from_here(member, error)
    finally:
        await there.close()


def _not_from_here(member: MemberCluster, error: PrfaasError) -> Finding:
    """Return the finding for a member that this machine cannot reach: failed if the operator cannot either."""
    reached = any(one.type == REACHABLE and one.status == "True" for one in member.status.conditions)
    text = f"{error}; the operator {'reaches it' if reached else 'does not reach it either'}"
    return Finding("from here", "warning" if reached and not isinstance(error, ConfigError) else "failed", text)


async def granted(there: ClusterClient, rules: Iterable[Object]) -> dict[str, bool]:
    """Return for each right in some rules of a Role, as `VERB RESOURCE`, whether these credentials have it."""
    reviews: list[tuple[str, dict[str, str]]] = []
    for rule in rules:
        group, (whole, *_) = rule["apiGroups"][0], rule["resources"]
        resource, _, subresource = whole.partition("/")
        name = rule.get("resourceNames", [""])[0]
        attributes = {"group": group, "resource": resource, "subresource": subresource, "name": name}
        reviews += [(f"{verb} {whole}", {**attributes, "verb": verb}) for verb in rule["verbs"]]
    answers = await asyncio.gather(*(_may(there, attributes) for _, attributes in reviews))
    return {words: answer for (words, _), answer in zip(reviews, answers, strict=True)}


async def _may(there: ClusterClient, attributes: Mapping[str, str]) -> bool:
    """Ask if these credentials may do something in the namespace; fields as in a SelfSubjectAccessReview."""
    spec = {"resourceAttributes": {**attributes, "namespace": there.namespace}}
    review = await there.create(kinds.ACCESS_REVIEW, kinds.manifest(kinds.ACCESS_REVIEW, {}, spec=spec))
    return bool(review["status"]["allowed"])


async def _namespace(there: ClusterClient) -> Finding:
    """Test with a dry run that the namespace accepts an object."""
    body = kinds.manifest(kinds.CONFIG_MAP, {"generateName": "prfaas-check-"})
    try:
        await there.create(kinds.CONFIG_MAP, body, dry_run=True)
    except PrfaasError as error:
        return Finding("namespace", "failed", str(error))
    return Finding("namespace", "ok", f"{there.namespace} takes objects")


async def _data_path(hub: ClusterClient, cluster: str, pools: Sequence[str]) -> Finding:
    policies = [read(PrfaaSPolicy, policy) for policy in await hub.list_all(kinds.POLICY)]
    using = [policy for policy in policies if set(policy.spec.prefill_pools) & set(pools)]
    links = [one for policy in using for one in policy.status.conditions if one.type == LINK_HEALTHY]
    addresses: set[tuple[str, int]] = set()
    for policy in using:
        table = read_config_map(await hub.get(kinds.CONFIG_MAP, names.routes_configmap(policy.metadata.name)))
        for instance in table.instances if table else ():
            url = urlsplit(instance.url)
            if instance.cluster == cluster and url.hostname:
                addresses.add((url.hostname, url.port or names.WORKER_API_PORT))
    tried = sorted(addresses)[:MOST_INSTANCES]
    answers = await asyncio.gather(*(_connects(host, port) for host, port in tried))
    reached = {f"{host}:{port}": answer for (host, port), answer in zip(tried, answers, strict=True)}
    return data_path_finding(links, reached)


async def _connects(host: str, port: int) -> bool:
    try:
        async with asyncio.timeout(CONNECT_SECONDS):
            _, writer = await asyncio.open_connection(host, port)
    except (TimeoutError, OSError):
        return False
    writer.close()
    return True


def is_well(findings: Iterable[Finding]) -> bool:
    """Return whether none has failed."""
    return all(finding.level != "failed" for finding in findings)


def operators_view(member: MemberCluster) -> Finding:
    ready = next((one for one in member.status.conditions if one.type == READY), None)
    if ready is None:
        return Finding("operator", "failed", "no operator has reconciled it; see `kubectl get deploy prfaas-operator`")
    return Finding("operator", "ok" if ready.status == "True" else "failed", f"{ready.reason}: {ready.message}")


def last_contact(member: MemberCluster, now: datetime) -> Finding:
    contact = member.status.last_contact_time
    if contact is None:
        return Finding("last contact", "failed", "the operator has never been answered")
    age = now - datetime.fromisoformat(contact)
    level: Level = "warning" if age > CONTACT_WARNING else "ok"
    return Finding("last contact", level, f"{contact}, {age.total_seconds():.0f} s ago")


def token_finding(facts: TokenFacts | None, name: str, now: datetime) -> Finding:
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


def version_finding(text: str) -> Finding:
    """Return if a server is new enough, from its gitVersion such as v1.34.4-eks-1a2b3c4."""
    minor = minor_of(text)
    if minor is None:
        return Finding("version", "warning", f"{text!r} is no version that this command knows")
    if minor < OLDEST_MINOR:
        return Finding("version", "failed", text, f"upgrade the cluster: 1.{OLDEST_MINOR} is needed")
    return Finding("version", "ok", text)


def minor_of(text: str) -> int | None:
    """Return the minor version in a gitVersion; None for what is no version 1 of Kubernetes."""
    numbers = text.removeprefix("v").split(".")
    known = len(numbers) > 1 and numbers[0] == "1" and numbers[1].rstrip("+").isdecimal()
    return int(numbers[1].rstrip("+")) if known else None


def clock_finding(one: datetime, other: datetime, between: str = "between hub and member") -> Finding:
    """Return the difference of two clocks; API servers' answers carry whole seconds."""
    apart = abs(one - other)
    level: Level = "failed" if apart > SKEW_FAILED else "warning" if apart > SKEW_WARNING else "ok"
    cure = "" if level == "ok" else "certificates and tokens depend on clocks that agree: see NTP on the nodes"
    return Finding("clock", level, f"{apart.total_seconds():.0f} s {between}", cure)


def rights_finding(reviews: Mapping[str, bool]) -> Finding:
    """Return the missing rights among those required, each as `VERB RESOURCE`."""
    missing = sorted(right for right, granted in reviews.items() if not granted)
    if missing:
        advice = "`prfaas cluster join` again, or upgrade the chart prfaas-member"
        return Finding("rights", "failed", f"missing: {', '.join(missing)}; {advice}")
    return Finding("rights", "ok", f"all {len(reviews)} granted: {', '.join(sorted(reviews))}")


def data_path_finding(links: Sequence[Condition], reached: Mapping[str, bool]) -> Finding:
    """Return if the data path works. The schedulers' measurement decides; connections from this machine are only shown.

    `links` are the conditions LinkHealthy of the cluster's policies, `reached` the connections by `HOST:PORT`.
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
    """Compare the fields of the hub's CRD with the fields that this version knows."""
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
