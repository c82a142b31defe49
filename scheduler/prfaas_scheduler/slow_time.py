"""The time of emulated instances that live slower than the clock: what comes in is of the clock, and decided in theirs.

Instances at a stretch of s take s times as long for everything, over a link that carries 1/s as much, for prompts that
come s times as seldom. All that a decision waits for, sums up or compares is in seconds: windows, backlogs, silence.
So a scheduler that took the clock's seconds would decide as no real one does: it would know s times fewer prompts, and
take each wait for s times as long. In the instances' own time the system is the one that it stands for, and the same
decision follows. The intervals of the policy are in that time, too.
"""

import math

import msgspec

from prfaas.routing.controller import Step
from prfaas.routing.links import LinkSample
from prfaas.wire.profile import Profile
from prfaas.wire.routes import RoutingTable
from prfaas_scheduler.measure import Measurements


def whole_seconds(seconds: float, stretch: float) -> int:
    """Return as many seconds of the clock, rounded up: windows of Prometheus and expiries are whole."""
    return math.ceil(seconds * stretch)


def own_table(table: RoutingTable) -> RoutingTable:
    """Return the table with what its links carry in the instances' time."""
    clusters = tuple(
        msgspec.structs.replace(one, capacity_mbps=round(one.capacity_mbps * table.stretch)) for one in table.clusters
    )
    return msgspec.structs.replace(table, clusters=clusters)


def own_measurements(measured: Measurements, stretch: float) -> Measurements:
    """Return what was measured by the clock in the instances' time."""
    return measured._replace(
        samples={name: _own_sample(sample, stretch) for name, sample in measured.samples.items()},
        profiles={key: _scaled(profile, 1 / stretch) for key, profile in measured.profiles.items()},
    )


def step_by_clock(step: Step, stretch: float) -> Step:
    """Return a step whose links and prices are those of the clock again."""
    return msgspec.structs.replace(
        step,
        links=tuple(msgspec.structs.replace(link, effective_mbps=link.effective_mbps / stretch) for link in step.links),
        prices=tuple(
            msgspec.structs.replace(price, profile=_scaled(price.profile, stretch), link_mbps=price.link_mbps / stretch)
            for price in step.prices
        ),
    )


def _own_sample(sample: LinkSample, stretch: float) -> LinkSample:
    ages = {"age_seconds": sample.age_seconds / stretch}
    if sample.instances_age_seconds is not None:
        ages["instances_age_seconds"] = sample.instances_age_seconds / stretch
    rates = {
        name: rate * stretch
        for name in ("traffic_mbps", "delivery_mbps", "latest_delivery_mbps")
        if (rate := getattr(sample, name)) is not None
    }
    return msgspec.structs.replace(sample, **ages, **rates)


def _scaled(profile: Profile, factor: float) -> Profile:
    times = {name: factor * getattr(profile, name) for name in ("fixed_seconds", "token_seconds", "squared_seconds")}
    return msgspec.structs.replace(profile, **times)
