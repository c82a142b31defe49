"""Gathers what `prfaas cluster check` tells: asks the hub, and the member with the credentials that the hub keeps."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit

from prfaas import names
from prfaas.api import KINDS, MemberCluster, PrefillPool, PrfaaSPolicy, crd
from prfaas.errors import ConfigError, PrfaasError
from prfaas_operator.clusters import api
from prfaas_operator.clusters.client import KubernetesCluster, Probe
from prfaas_operator.clusters.connect import connect_member
from prfaas_operator.join import Place, at
from prfaas_operator.plan import check as plan
from prfaas_operator.plan import tokens
from prfaas_operator.plan.check import Finding
from prfaas_operator.plan.conditions import REACHABLE
from prfaas_operator.plan.kubeconfig import Access
from prfaas_operator.plan.member import users_of
from prfaas_operator.reconcile.members import access_from
from prfaas_operator.reconcile.reading import read
from prfaas_operator.render import account
from prfaas_operator.render.routes import read_config_map

LINK_HEALTHY: Final = "LinkHealthy"
CONNECT_SECONDS: Final = 3.0
MOST_INSTANCES: Final = 16


class Report(NamedTuple):
    """The findings about one cluster; `hub` for what concerns all."""

    cluster: str
    findings: tuple[Finding, ...]


async def check(hub: Place, name: str | None) -> list[Report]:
    """Check the hub, and one member or all.

    Raises:
        ConfigError: there is no such MemberCluster, or the hub refuses what a check has to read.

    """
    async with at(hub) as here:
        found = [read(MemberCluster, one) for one in await here.cluster.list_all(api.MEMBER_CLUSTER)]
        chosen = [member for member in found if name in (None, member.metadata.name)]
        if name is not None and not chosen:
            known = ", ".join(member.metadata.name for member in found) or "none"
            raise ConfigError(f"MemberCluster {name} does not exist in namespace {hub.namespace} (there are: {known})")
        hub_probe = await here.cluster.probe()
        reports = [Report(names.HUB, tuple(await _crds(here.cluster)))]
        for member in chosen:
            findings = [finding async for finding in _member(here.cluster, hub_probe, member)]
            reports.append(Report(member.metadata.name, tuple(findings)))
        return reports


async def _crds(hub: KubernetesCluster) -> list[Finding]:
    findings = []
    for kind in KINDS:
        wanted = crd.crd(kind)
        try:
            live = await hub.get(api.CUSTOM_RESOURCE, wanted["metadata"]["name"])
        except PrfaasError as error:
            findings.append(Finding(f"CRD {kind.kind_name}", "warning", f"cannot be read with your rights: {error}"))
            continue
        findings.append(plan.crd_skew(kind.kind_name, wanted, live))
    return findings


async def _member(hub: KubernetesCluster, hub_probe: Probe, member: MemberCluster) -> AsyncIterator[Finding]:
    now = hub.now()
    yield plan.operators_view(member)
    yield plan.last_contact(member, now)
    secret_name = member.spec.kubeconfig_secret_ref.name
    try:
        access = access_from(member, await hub.get(api.SECRET, secret_name))
    except PrfaasError as error:
        yield Finding("kubeconfig", "failed", str(error))
        return
    yield Finding("kubeconfig", "ok", f"Secret {secret_name} is accepted, for {access.server}")
    yield plan.token(tokens.read(access.token), member.metadata.name, now)
    async for finding in _with_credentials(hub_probe, member, access):
        yield finding
    pools = [read(PrefillPool, pool) for pool in await hub.list_all(api.PREFILL_POOL)]
    if users := users_of(member.metadata.name, pools):
        yield await _data_path(hub, member.metadata.name, users)


async def _with_credentials(hub_probe: Probe, member: MemberCluster, access: Access) -> AsyncIterator[Finding]:
    """Ask the member's API server from here, as the operator would."""
    try:
        there = await connect_member(member.metadata.name, member.spec.namespace, access)
    except PrfaasError as error:
        yield Finding("kubeconfig", "failed", str(error))
        return
    try:
        probe = await there.probe()
        yield Finding("from here", "ok", f"answered in {probe.seconds * 1000:.0f} ms")
        yield plan.version(probe.version)
        yield plan.clock(hub_probe.date, probe.date - (probe.asked_at - hub_probe.asked_at))
        yield plan.rights(await _rights(there))
        yield await _namespace(there)
    except PrfaasError as error:
        yield _not_from_here(member, error)
    finally:
        await there.close()


def _not_from_here(member: MemberCluster, error: PrfaasError) -> Finding:
    """Say that a member cannot be asked from here, which matters only where the operator cannot either."""
    reached = any(one.type == REACHABLE and one.status == "True" for one in member.status.conditions)
    told = f"{error}; the operator {'reaches it' if reached else 'does not reach it either'}"
    return Finding("from here", "warning" if reached and not isinstance(error, ConfigError) else "failed", told)


async def _rights(there: KubernetesCluster) -> dict[str, bool]:
    """Ask for every right that the member's Role gives, verb by verb."""
    (role,) = [one for one in account.member_account(there.namespace) if one["kind"] == api.ROLE.name]
    asked: list[tuple[str, dict[str, str]]] = []
    for rule in role["rules"]:
        group, resource = rule["apiGroups"][0], rule["resources"][0]
        resource, _, subresource = resource.partition("/")
        name = rule.get("resourceNames", [""])[0]
        attributes = {"group": group, "resource": resource, "subresource": subresource, "name": name}
        asked += [(f"{verb} {rule['resources'][0]}", {**attributes, "verb": verb}) for verb in rule["verbs"]]
    answers = await asyncio.gather(*(there.may(attributes) for _, attributes in asked))
    return {words: answer for (words, _), answer in zip(asked, answers, strict=True)}


async def _namespace(there: KubernetesCluster) -> Finding:
    """Try whether the namespace takes an object, without leaving one."""
    body: dict[str, Any] = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"generateName": "prfaas-check-"}}
    try:
        await there.try_create(api.CONFIG_MAP, body)
    except PrfaasError as error:
        return Finding("namespace", "failed", str(error))
    return Finding("namespace", "ok", f"{there.namespace} takes objects")


async def _data_path(hub: KubernetesCluster, cluster: str, pools: Sequence[str]) -> Finding:
    policies = [read(PrfaaSPolicy, policy) for policy in await hub.list_all(api.POLICY)]
    using = [policy for policy in policies if set(policy.spec.prefill_pools) & set(pools)]
    links = [one for policy in using for one in policy.status.conditions if one.type == LINK_HEALTHY]
    addresses: set[tuple[str, int]] = set()
    for policy in using:
        table = read_config_map(await hub.get(api.CONFIG_MAP, names.routes_configmap(policy.metadata.name)))
        for instance in table.instances if table else ():
            url = urlsplit(instance.url)
            if instance.cluster == cluster and url.hostname:
                addresses.add((url.hostname, url.port or names.WORKER_API_PORT))
    tried = sorted(addresses)[:MOST_INSTANCES]
    answers = await asyncio.gather(*(_connects(host, port) for host, port in tried))
    reached = {f"{host}:{port}": answer for (host, port), answer in zip(tried, answers, strict=True)}
    return plan.data_path(links, reached)


async def _connects(host: str, port: int) -> bool:
    try:
        async with asyncio.timeout(CONNECT_SECONDS):
            _, writer = await asyncio.open_connection(host, port)
    except (TimeoutError, OSError):
        return False
    writer.close()
    return True
