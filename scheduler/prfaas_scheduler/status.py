"""Writes the scheduler's part of a PrfaaSPolicy's status: pure functions make it of a step, one replica writes it.

Fields that are not known are left out. A server-side apply then removes them, and the column is empty instead of wrong.
A condition names its cause in its reason, and keeps its lastTransitionTime until its status changes.

The leader, the replica that holds the Lease `<policy>-scheduler`, writes. It writes a change of threshold, bandwidth or
condition at once, but not twice within two seconds. It writes the figures every ten seconds, changed or not, so that a
field that somebody else removed comes back. An API server that is down delays the status and nothing else.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple

from prfaas.conditions import ConditionState, conditions_body, rfc3339
from prfaas.errors import ConfigError, PeerError, PrfaasError, UnreachableError
from prfaas.kube import KubeSession, LeaseHolder, ObjectKind, ObjectRef
from prfaas.kube.session import encode_body
from prfaas.names import API_VERSION, FIELD_MANAGER_SCHEDULER, scheduler_lease
from prfaas.routing.controller import Step
from prfaas.util import LogOnce
from prfaas.wire.control import LinkReport
from prfaas.wire.routes import RoutingTable

log = logging.getLogger(__name__)

METRICS_FRESH: Final = "MetricsFresh"
LINK_HEALTHY: Final = "LinkHealthy"
MAX_MESSAGE_CHARS: Final = 1000
POLL_SECONDS = 0.5
# A fifth of the Lease, so that four renewals may fail before another replica takes it.
RENEW_SECONDS = 3.0
MIN_WRITE_SECONDS = 2.0
MAX_WRITE_SECONDS = 10.0
TIMEOUT_SECONDS = 5.0
POLICY = ObjectKind(API_VERSION, "PrfaaSPolicy", "prfaaspolicies")

LINK_REASONS: Mapping[str, tuple[str, str]] = {
    "Unreachable": ("ClusterUnreachable", "its API server does not answer the operator: see the MemberCluster"),
    "NoReadyInstance": ("NoReadyInstance", "no instance of its pools is Ready: see the PrefillPool"),
    "Silent": (
        "NoSamples",
        "Prometheus has fresh samples of the hub and none of it: is it scraped, with the label cluster?",
    ),
}


class Report(NamedTuple):
    """The content of the status: figures (None: not known) and conditions by type."""

    generation: int
    figures: Mapping[str, Any]
    conditions: Mapping[str, ConditionState]

    @property
    def turning_points(self) -> tuple[Any, ...]:
        """Return what is written at once when it changes: threshold, bandwidth, each condition's status and reason."""
        conditions = tuple((type_, *condition[:2]) for type_, condition in self.conditions.items())
        return (self.generation, self.figures["thresholdTokens"], self.figures["bandwidth"], conditions)


def report_of(
    table: RoutingTable,
    step: Step,
    errors: Sequence[PrfaasError],
    offloaded: int | None,
    before: Report | None,
    observed: Mapping[str, Any] | None = None,
) -> Report:
    """Return the report after a step.

    `errors` are those of its queries, `offloaded` is in percent of recent requests, and `observed` is the summary for
    the long loop.
    """
    fresh = metrics_fresh(table, step, errors)
    if fresh is None:  # held: neither fresh nor yet stale
        starting = ConditionState("Unknown", "Starting", "nothing measured yet")
        fresh = before.conditions[METRICS_FRESH] if before else starting
    return Report(
        generation=table.generation,
        figures={
            "thresholdTokens": step.tokens,
            "bandwidth": step.bandwidth,
            "offloadedPercent": offloaded,
            "linkUtilisationPercent": busiest_percent(step),
            "observed": observed,
        },
        conditions={METRICS_FRESH: fresh, LINK_HEALTHY: link_healthy(step.links)},
    )


def metrics_fresh(table: RoutingTable, step: Step, errors: Sequence[PrfaasError]) -> ConditionState | None:
    """Say whether measurements come in; None while a gap is shorter than stale_after_seconds."""
    if not table.prometheus_url:
        return ConditionState(
            "Unknown", "NotConfigured", "spec.metrics.prometheusUrl is not set: the link is not measured"
        )
    if step.metrics == "Fresh":
        return ConditionState("True", "Fresh", "every live link is measured")
    if step.metrics == "Held":
        return None
    consequence = f"no new measurement of a live link for {table.stale_after_seconds} s"
    if table.threshold.mode in {"Auto", "Priced"}:
        consequence += f"; the threshold is back at {step.tokens} tokens"
    cause = str(errors[0]) if errors else "Prometheus answers without a sample that is new: is it scraping the workers?"
    return ConditionState("False", _stale_reason(errors), f"{consequence}. {cause}")


def _stale_reason(errors: Sequence[PrfaasError]) -> str:
    if not errors:
        return "NoSamples"
    if isinstance(errors[0], UnreachableError):
        return "PrometheusUnreachable"
    return "QueryRejected" if isinstance(errors[0], ConfigError) else "AnswerDamaged"


def link_healthy(links: Sequence[LinkReport]) -> ConditionState:
    """Say whether prompts may cross every link; the first dead one gives the reason, the message names all."""
    if not links:
        return ConditionState("Unknown", "NoMemberCluster", "no pool of this policy lies in a member cluster")
    dead = [link for link in links if link.state != "Alive"]
    if not dead:
        return ConditionState("True", "AllAlive", f"{', '.join(link.cluster for link in links)}: alive")
    message = "; ".join(f"{link.cluster}: {LINK_REASONS[link.state][1]}" for link in dead)
    return ConditionState("False", LINK_REASONS[dead[0].state][0], message)


def busiest_percent(step: Step) -> int | None:
    """Return the utilisation of the busiest live link in percent; None while none is measured."""
    known = [
        link.utilisation_percent
        for link in step.links
        if link.state == "Alive" and link.utilisation_percent is not None and step.metrics != "Stale"
    ]
    return round(max(known)) if known else None


def body_of(report: Report, known: Sequence[Mapping[str, Any]], now: str) -> dict[str, Any]:
    """Return the status to apply; `known` are the conditions as they stand in the object, `now` in RFC 3339."""
    # By type and status: a time of transition stays as long as the status does, whatever its reason.
    since = {(one.get("type", ""), one.get("status", "")): one.get("lastTransitionTime", "") for one in known}
    conditions = conditions_body(report.conditions, since, report.generation, now, MAX_MESSAGE_CHARS)
    return {**{name: value for name, value in report.figures.items() if value is not None}, "conditions": conditions}


class Publisher:
    """One candidate for writing the status of one policy; `latest` returns the report as it stands.

    The session's account may get and patch the policy's status, and get and update the Lease.
    """

    def __init__(
        self,
        session: KubeSession,
        policy: ObjectRef,
        identity: str,
        latest: Callable[[], Report | None],
        clock: Callable[[], float] = time.monotonic,
    ):
        self._session = session
        self._policy = policy
        self._latest = latest
        self._clock = clock
        self._lease = LeaseHolder(session, policy.namespace, scheduler_lease(policy.name), identity, clock)
        self._failures = LogOnce(log)
        self._renew_at = float("-inf")
        self._written: Report | None = None
        self._written_at = float("-inf")
        self._conditions: Sequence[Mapping[str, Any]] | None = None
        """As they stand in the object; None: to be read first."""

    async def run(self) -> None:
        """Write until cancelled, then give the Lease up."""
        try:
            while True:
                await self.once()
                await asyncio.sleep(POLL_SECONDS)
        finally:
            await self._lease.release()

    async def once(self) -> None:
        """Renew the Lease and write the status, where either is due. Failures are logged and tried again."""
        try:
            await self._keep_lease()
            report = self._latest()
            if self._lease.is_holder and report is not None and self._due(report):
                await self._write(report)
        except PrfaasError as error:
            what = f"writing the status of {self._policy}"
            self._failures.failed(what, f"{what} failed: {error}", reason=type(error))

    async def _keep_lease(self) -> None:
        if self._clock() < self._renew_at:
            return
        self._renew_at = self._clock() + RENEW_SECONDS
        was_holder = self._lease.is_holder
        if await self._lease.acquire_or_renew() and not was_holder:
            self._conditions = self._written = None  # another replica may have written meanwhile

    def _due(self, report: Report) -> bool:
        age_seconds = self._clock() - self._written_at
        if age_seconds >= MAX_WRITE_SECONDS:
            return True
        turned = self._written is None or self._written.turning_points != report.turning_points
        return turned and age_seconds >= MIN_WRITE_SECONDS

    async def _write(self, report: Report) -> None:
        self._written_at = self._clock()  # also when it fails: a server in trouble is not asked twice a second
        known = await self._read_conditions() if self._conditions is None else self._conditions
        body = body_of(report, known, rfc3339(datetime.now(UTC)))
        try:
            await self._apply(body)
        except PeerError:
            self._conditions = None  # it may have been written all the same
            raise
        self._conditions, self._written = body["conditions"], report
        self._failures.worked(f"writing the status of {self._policy}")

    async def _apply(self, status: Mapping[str, Any]) -> None:
        """Own exactly these fields of the status: what was applied before and is left out now is removed.

        A missing policy is StatusError 404: an apply to a subresource creates nothing.
        """
        metadata = {"name": self._policy.name, "namespace": self._policy.namespace}
        body = {"apiVersion": POLICY.api_version, "kind": POLICY.name, "metadata": metadata, "status": status}
        # Forced: a field that somebody else wrote meanwhile is taken back instead of a conflict.
        query, sent = {"fieldManager": FIELD_MANAGER_SCHEDULER, "force": "true"}, encode_body(body)
        path = f"{self._policy.path}/status"
        await self._session.call("PATCH", path, query=query, body=sent, timeout_seconds=TIMEOUT_SECONDS)

    async def _read_conditions(self) -> Sequence[Mapping[str, Any]]:
        current = await self._session.call("GET", f"{self._policy.path}/status", timeout_seconds=TIMEOUT_SECONDS)
        return (current.get("status") or {}).get("conditions") or []


def policy_ref(namespace: str, name: str) -> ObjectRef:
    return ObjectRef(POLICY, namespace, name)
