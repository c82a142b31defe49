"""Says what the loop cannot measure, and what an owner can do about it: the condition LoopMeasured of a policy. And
says whose caches are refused for their kind: CachesFit.

Engines publish different things. What one of them lacks must not end in a threshold that silently stays where it is.
So every fact that a decision would use is looked for, and each that is missing gets a sentence with its cure. Facts
come and go with scrapes and restarts. So the condition changes only after what is missing has stayed the same for the
time at which measurements expire.
"""

from collections.abc import Iterator
from typing import Final

from prfaas.conditions import ConditionState
from prfaas.engines import ENGINES
from prfaas.names import HUB
from prfaas.wire.routes import RoutingTable, measured_as
from prfaas_scheduler.engines import queries_of
from prfaas_scheduler.measure import Measurements

LOOP_MEASURED: Final = "LoopMeasured"
CACHES_FIT: Final = "CachesFit"
_NOT_CONFIGURED: Final = ConditionState("Unknown", "NotConfigured", "spec.metrics.prometheusUrl is not set")
_STARTING: Final = ConditionState("Unknown", "Starting", "nothing measured yet")


def caches_fit(table: RoutingTable, measured: Measurements, before: ConditionState | None) -> ConditionState:
    """Return whether instances take the caches of others; `before` is the last answer."""
    if not table.prometheus_url:
        return _NOT_CONFIGURED
    if measured.errors:
        return before or _STARTING
    if not measured.mismatches:
        return ConditionState("True", "NoneRefused", "no instance refused a cache for its kind in the last 10 minutes")
    cluster, reason = measured.mismatches[0]
    more = f" (and {len(measured.mismatches) - 1} more)" if len(measured.mismatches) > 1 else ""
    text = f"instances in {cluster} refuse caches, and compute their prompts themselves: {reason}{more}"
    return ConditionState("False", "CachesDiffer", text)


class LoopCondition:
    """The condition LoopMeasured, and since when another one would be true."""

    def __init__(self) -> None:
        self._shown = _STARTING
        self._next = _STARTING
        self._next_since_seconds = 0.0

    def state(self, now_seconds: float, table: RoutingTable, measured: Measurements) -> ConditionState:
        """Return the condition after a round of measurements; one whose queries failed says nothing new."""
        if not table.prometheus_url:
            return _NOT_CONFIGURED
        if measured.errors:
            return self._shown
        found = _condition(list(lacking(table, measured)))
        if found != self._next:
            self._next, self._next_since_seconds = found, now_seconds
        if now_seconds - self._next_since_seconds >= table.stale_after_seconds:
            self._shown = found
        return self._shown


def _condition(sentences: list[str]) -> ConditionState:
    if sentences:
        return ConditionState("False", "LoopNotMeasured", ". ".join(sentences))
    return ConditionState("True", "Measured", "queues, prefills and links of all pools are measured")


def lacking(table: RoutingTable, measured: Measurements) -> Iterator[str]:
    """Yield a sentence for each fact that no measurement and no pool tells."""
    ready = {(one.engine, one.cluster) for one in table.instances if one.state == "Ready"}
    for engine, cluster in sorted(ready):
        yield from _of_instances(engine, cluster, measured)
        if cluster != HUB and table.threshold.mode != "Disabled":
            yield from _of_link(engine, cluster, measured)
    yield from _of_prefills(table, measured)


def _of_instances(engine: str, cluster: str, measured: Measurements) -> Iterator[str]:
    if ("instances_sampled_at_seconds", cluster) not in measured.facts:
        yield (
            f"no instance of {engine} in {cluster} is measured: let Prometheus scrape the port "
            f"{ENGINES[engine].probed_port} of its pods, with the labels cluster, pool and role"
        )
    elif ("waiting_prefills", cluster) not in measured.facts:
        cure = queries_of(engine).lacks.get("waiting_prefills", "the threshold follows the link alone")
        yield f"how many prefills wait at {engine} in {cluster} is not published: {cure}"


def _of_link(engine: str, cluster: str, measured: Measurements) -> Iterator[str]:
    sample = measured.samples.get(cluster)
    if ("sampled_at_seconds", cluster) in measured.facts:
        return
    if port := ENGINES[engine].link_port:
        yield (
            f"the bytes that leave MemberCluster {cluster} are counted and not scraped: let Prometheus scrape "
            f"the port {port} of its pods"
        )
    elif sample is None or sample.traffic_mbps is None:
        yield (
            f"{engine} counts no bytes of the link of MemberCluster {cluster}, and its link.utilisationQuery answers "
            "nothing: set it to the counters of a router or a node, or let vLLM use the connector Prfaas"
        )
    else:
        yield (
            f"{engine} does not say what waits for the link of MemberCluster {cluster}: a link that got narrower than "
            "link.capacityMbps looks idle. Set that to what the link always carries, or let vLLM use the connector "
            "Prfaas"
        )


def _of_prefills(table: RoutingTable, measured: Measurements) -> Iterator[str]:
    prefilling = [one for one in table.instances if one.role == "prefill" and one.state == "Ready"]
    pools = {measured_as(table, one): one.engine for one in prefilling}
    sized = bool(measured.cache_sizes) or any(one.profile.token_bytes for one in table.profiles)
    for key, engine in sorted(pools.items()):
        if key in measured.profiles:
            continue
        cluster, pool = key
        if not sized and cluster != HUB and not ENGINES[engine].has_profile:
            yield f"nobody says how large a cache is: set profile.tokenBytes and stateBytes of pool {pool}"
        else:
            why = queries_of(engine).lacks.get("prefill_seconds", "it needs some prefills of different lengths")
            yield f"the prefill times of pool {pool} are not known ({why}): set profile.points of it until they are"
