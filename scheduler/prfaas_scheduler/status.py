"""The scheduler's part of a PrfaaSPolicy's status, from one step of the controller. Pure.

Fields that are not known are left out: a server-side apply then removes them, and the column is empty instead of wrong.
A condition names its cause in its reason, and keeps its lastTransitionTime until its status changes.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple

from prfaas.errors import ConfigError, PrfaasError, UnreachableError
from prfaas.routing.controller import Step
from prfaas.wire.control import Counters, LinkReport
from prfaas.wire.routes import RoutingTable

METRICS_FRESH: Final = "MetricsFresh"
LINK_HEALTHY: Final = "LinkHealthy"
MAX_MESSAGE_CHARS: Final = 1000

LINK_REASONS: Mapping[str, tuple[str, str]] = {
    "Unreachable": ("ClusterUnreachable", "its API server does not answer the operator: see the MemberCluster"),
    "NoReadyInstance": ("NoReadyInstance", "no instance of its pools is Ready: see the PrefillPool"),
    "Silent": (
        "NoSamples",
        "Prometheus has fresh samples of the hub and none of it: is it scraped, with the label cluster?",
    ),
}


class Verdict(NamedTuple):
    """What one condition says, before it knows since when."""

    status: Literal["True", "False", "Unknown"]
    reason: str
    message: str


class Report(NamedTuple):
    """All that the status says: figures (None: not known) and conditions by type."""

    generation: int
    figures: Mapping[str, Any]
    conditions: Mapping[str, Verdict]

    @property
    def turning_points(self) -> tuple[Any, ...]:
        """What is worth a write at once: the threshold, the bandwidth, and each condition's status and reason."""
        conditions = tuple((type_, *verdict[:2]) for type_, verdict in self.conditions.items())
        return (self.generation, self.figures["thresholdTokens"], self.figures["bandwidth"], conditions)


def report(
    table: RoutingTable,
    step: Step,
    errors: Sequence[PrfaasError],
    offloaded: int | None,
    before: Report | None,
    observed: Mapping[str, Any] | None = None,
) -> Report:
    """Return what to say after a step.

    Args:
        table: the policy's.
        step: what was decided.
        errors: of its queries.
        offloaded: percent of recent requests, if known.
        before: what was said before.
        observed: the summary for the long loop, if there is one.

    """
    fresh = metrics_fresh(table, step, errors)
    if fresh is None:  # held: neither fresh nor yet stale
        fresh = before.conditions[METRICS_FRESH] if before else Verdict("Unknown", "Starting", "nothing measured yet")
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


def metrics_fresh(table: RoutingTable, step: Step, errors: Sequence[PrfaasError]) -> Verdict | None:
    """Say whether measurements come in; None while a gap is shorter than stale_after_seconds."""
    if not table.prometheus_url:
        return Verdict("Unknown", "NotConfigured", "spec.metrics.prometheusUrl is not set: the link is not measured")
    if step.metrics == "Fresh":
        return Verdict("True", "Fresh", "every live link is measured")
    if step.metrics == "Held":
        return None
    consequence = f"no new measurement of a live link for {table.stale_after_seconds} s"
    if table.threshold.mode in {"Auto", "Priced"}:
        consequence += f"; the threshold is back at {step.tokens} tokens"
    cause = str(errors[0]) if errors else "Prometheus answers without a sample that is new: is it scraping the workers?"
    return Verdict("False", _stale_reason(errors), f"{consequence}. {cause}")


def _stale_reason(errors: Sequence[PrfaasError]) -> str:
    if not errors:
        return "NoSamples"
    if isinstance(errors[0], UnreachableError):
        return "PrometheusUnreachable"
    return "QueryRejected" if isinstance(errors[0], ConfigError) else "AnswerDamaged"


def link_healthy(links: Sequence[LinkReport]) -> Verdict:
    """Say whether prompts may cross every link; the first dead one gives the reason, the message names all."""
    if not links:
        return Verdict("Unknown", "NoMemberCluster", "no pool of this policy lies in a member cluster")
    dead = [link for link in links if link.state != "Alive"]
    if not dead:
        return Verdict("True", "AllAlive", f"{', '.join(link.cluster for link in links)}: alive")
    message = "; ".join(f"{link.cluster}: {LINK_REASONS[link.state][1]}" for link in dead)
    return Verdict("False", LINK_REASONS[dead[0].state][0], message)


def busiest_percent(step: Step) -> int | None:
    """Return the utilisation of the busiest live link in percent; None while none is measured."""
    known = [
        link.utilisation_percent
        for link in step.links
        if link.state == "Alive" and link.utilisation_percent is not None and step.metrics != "Stale"
    ]
    return round(max(known)) if known else None


def offloaded_percent(first: Counters, last: Counters) -> int | None:
    """Return the share of offloaded requests between two counts; None when there was none, or the gateway restarted."""
    offloaded, local = last.offloaded - first.offloaded, last.local - first.local
    if offloaded < 0 or local < 0 or offloaded + local == 0:
        return None
    return round(100 * offloaded / (offloaded + local))


def body(said: Report, known: Sequence[Mapping[str, Any]], now: str) -> dict[str, Any]:
    """Return the status to apply; `known` are the conditions as they stand in the object, `now` in RFC 3339."""
    since = {(one.get("type"), one.get("status")): one.get("lastTransitionTime") for one in known}
    conditions = [
        {
            "type": type_,
            "status": verdict.status,
            "reason": verdict.reason,
            "message": verdict.message[:MAX_MESSAGE_CHARS],
            "observedGeneration": said.generation,
            "lastTransitionTime": since.get((type_, verdict.status)) or now,
        }
        for type_, verdict in said.conditions.items()
    ]
    return {**{name: value for name, value in said.figures.items() if value is not None}, "conditions": conditions}
