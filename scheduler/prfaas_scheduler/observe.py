"""What the operator's long loop plans with, summed up: one more query now and then, and a few hundred bytes of status.

The loop's own figures are of seconds; these are of minutes, so they are asked for seldom, and a summary that cannot be
renewed grows old by its own time instead of being thinned out. Integers only, as in every custom resource.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from prfaas.capacity.profile import points_of
from prfaas.capacity.workload import slices
from prfaas.names import HUB
from prfaas.routing.lengths import EDGES
from prfaas.wire.control import LinkReport
from prfaas.wire.profile import Profile
from prfaas.wire.routes import RoutingTable
from prfaas_scheduler.measure import matcher, own_pools
from prfaas_scheduler.prometheus import FIGURE_LABEL, Figure

OBSERVE_SECONDS: Final = 30.0
WINDOW_SECONDS: Final = 300

# Matchers: $decode of the hub's pools that decode, $pools of all of this policy's pools.
FIGURES: Final[Mapping[str, str]] = {
    "decode_seconds": "sum(rate(prfaas_decode_seconds_total{$decode}[$window]))",
    "decode_steps": "sum(rate(prfaas_decode_steps_total{$decode}[$window]))",
    "tokens": "sum(rate(prfaas_generation_tokens_total{$decode}[$window]))",
    "answers": 'sum(rate(vllm:request_success_total{$decode, finished_reason=~"stop|length"}[$window]))',
    "batch": "min(prfaas_requests_running_limit{$decode})",
    "waiting": "sum by (pool) (prfaas_prefills_waiting{$pools})",
}


class Seen(NamedTuple):
    """What goes into a summary beside the query's own figures."""

    lengths: Sequence[int]
    """Prompts of the last minutes by bin."""
    arrivals_per_second: float
    """At this gateway, over the same minutes."""
    links: Sequence[LinkReport]
    profiles: Mapping[tuple[str, str], Profile]
    """By cluster and pool."""


def query(table: RoutingTable) -> str:
    """Return the one query for all figures, told apart by the label `figure`."""
    decoding = sorted({one.pool for one in table.instances if one.role == "decode"})
    decode = f"{matcher('cluster', [HUB])}, {matcher('pool', decoding)}"
    filled = {
        name: expression.replace("$decode", decode)
        .replace("$pools", own_pools(table))
        .replace("$window", f"{WINDOW_SECONDS}s")
        for name, expression in FIGURES.items()
    }
    return " or ".join(f'label_replace({text}, "{FIGURE_LABEL}", "{name}", "", "")' for name, text in filled.items())


def summary(seen: Seen, figures: Sequence[Figure], now: str) -> dict[str, Any]:
    """Return the policy's status.observed; `now` in RFC 3339. What is not known is left out."""
    values = {figure.labels.get(FIGURE_LABEL, ""): figure.value for figure in figures if "pool" not in figure.labels}
    waiting = {figure.labels["pool"]: figure.value for figure in figures if "pool" in figure.labels}
    known = {
        "outputMilliTokens": _quotient(1000, values.get("tokens"), values.get("answers")),
        "decodeStepMicros": _quotient(1_000_000, values.get("decode_seconds"), values.get("decode_steps")),
        "decodeBatch": _whole(values.get("batch")) or None,
    }
    profiles = {pool: profile for (_, pool), profile in seen.profiles.items()}
    return {
        "time": now,
        "prompts": sum(seen.lengths),
        "gatewayArrivalMilliPerSecond": round(1000 * seen.arrivals_per_second),
        "lengthTokens": slices(EDGES, seen.lengths),
        **{name: value for name, value in known.items() if value is not None},
        "links": [
            {"clusterName": link.cluster, "effectiveMbps": round(link.effective_mbps)}
            for link in seen.links
            if link.state == "Alive"
        ],
        "pools": [
            _pool(name, profiles.get(name), _whole(waiting.get(name))) for name in sorted(profiles.keys() | waiting)
        ],
    }


def _pool(name: str, profile: Profile | None, waiting: int) -> dict[str, Any]:
    pool: dict[str, Any] = {"name": name, "waitingPrefills": waiting}
    if profile is None:
        return pool
    points = [
        {"tokens": one.tokens, "prefillMicros": round(1e6 * one.seconds), "cacheBytes": round(one.cache_bytes)}
        for one in points_of(profile)
    ]
    return {**pool, "samples": profile.samples, "profile": points}


def _quotient(scale: int, amount: float | None, each: float | None) -> int | None:
    """Return scale * amount / each, rounded; None where either is missing or makes no sense."""
    if amount is None or each is None or not (0 < amount < 1e12 and 1e-9 < each < 1e12):
        return None
    return round(scale * amount / each)


def _whole(value: float | None) -> int:
    return round(value) if value is not None and 0 <= value < 1e9 else 0
