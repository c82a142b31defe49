"""Estimates of one link: its state, its effective capacity, and the pressure of its traffic and queues.

All pressures are on one scale, percent:

    utilisation  traffic / effective capacity, or the share of time in which data waited, whichever is more
    drain        unsent bytes / effective capacity;      2 s of it count as 100 %
    queue        prefills waiting per Ready instance;    4 of them count as 100 %

Three things make this hard:

- A link that got narrower looks *idle* beside its declared capacity. It carries 5 of 100 Mbit/s because it can carry no
  more. So capacity is what the link was seen to deliver while data waited for it. When nothing waits there is nothing
  to see. The last estimate is held and probed upward by a tenth an interval, as far as the declared capacity.
- Rates are means over a window, in which a collapse shows only little by little. What the latest two scrapes say alone
  is noisy. So it is believed only of a collapse. Then data waited for most of that time, and the link delivered less
  than half of what the window says.
- Metrics lie, and contradict each other. A figure that is no number, negative or infinite counts as not measured. A
  traffic below what our own counters prove is raised to that. A link that alone went silent is dead (one lost scrape is
  not silence). So is one whose cluster is unreachable or has no Ready instance. A router near the hub goes on counting
  when a member is cut off: once its instances were measured, a sample without them is silence.
"""

import math
from typing import Literal

import msgspec
from msgspec.structs import replace

from prfaas.wire.control import LinkReport

PROBE_FACTOR = 1.1
COLLAPSE_SHARE = 0.5
MIN_COLLAPSED_FRACTION = 0.5
SATURATED_DRAIN_SECONDS = 2.0
SATURATED_QUEUE_PER_INSTANCE = 4.0
MIN_BACKLOGGED_FRACTION = 0.02  # below this too little data waited to say what the link can deliver
MAX_PERCENT = 1000.0
SILENT_AFTER_SECONDS = 1.5  # a busy worker may miss one scrape of a second; then the link would flap


LinkState = Literal["Alive", "Unreachable", "NoReadyInstance", "Silent"]


class LinkSample(msgspec.Struct, frozen=True, kw_only=True):
    """The measurements of one link. Any figure may be absurd; `usable` keeps the sensible ones."""

    sampled_at_seconds: float
    """When the newest sample was taken, by the measuring system's clock; only told apart from the one before."""
    age_seconds: float
    instances_age_seconds: float | None = None
    """When an instance of the cluster was measured last, before now; None: only what others count is known."""
    traffic_mbps: float | None = None
    delivery_mbps: float | None = None
    """Rate of delivery over the time in which data waited; None: none did."""
    backlogged_fraction: float = 0.0
    """Share of wall time in which data waited, 0 to 1."""
    latest_delivery_mbps: float | None = None
    latest_backlogged_fraction: float = 0.0
    """Both of these over the latest two scrapes alone."""
    unsent_bytes: float = 0.0
    waiting_prefills: float = 0.0


class LinkFacts(msgspec.Struct, frozen=True, kw_only=True):
    """One link: what the routing table says of it, and its sample. None: no instance there was measured."""

    cluster: str
    capacity_mbps: float
    reachable: bool
    ready_instances: int
    sample: LinkSample | None


class LinkView(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a step believes of one link; the next step starts from it.

    `link_percent` is the link's own pressure; None when the step brought no new measurement. All other figures are then
    those of the last one.
    """

    cluster: str
    state: LinkState = "Alive"
    declared_mbps: float
    effective_mbps: float
    utilisation_percent: float | None = None
    sampled_at_seconds: float | None = None
    measured_at_seconds: float
    """By our clock: when a new sample came last, or the link was first known."""
    heard_at_seconds: float = -math.inf
    """By our clock: when there was a sample at all; -inf: never."""
    instances_seen: bool = False
    """True once an instance of the cluster was measured itself."""
    unsent_bytes: float = 0.0
    link_percent: float | None = None
    waiting_per_instance: float = 0.0
    """Prefills that wait, over the Ready instances."""

    @property
    def pressure_percent(self) -> float:
        queue_percent = 100.0 * self.waiting_per_instance / SATURATED_QUEUE_PER_INSTANCE
        return max(self.link_percent or 0.0, queue_percent)

    @property
    def drain_seconds(self) -> float:
        """How long the link needs for what waits for it."""
        return self.unsent_bytes * 8 / 1e6 / self.effective_mbps

    @property
    def report(self) -> LinkReport:
        """The part that the gateway and the policy's status show."""
        return LinkReport(
            cluster=self.cluster,
            state=self.state,
            effective_mbps=self.effective_mbps,
            utilisation_percent=self.utilisation_percent,
        )


def view_link(
    link: LinkFacts, before: LinkView | None, now_seconds: float, stale_after_seconds: int, *, hub_measured: bool
) -> LinkView:
    """Return what one step believes of one link; `before` is the view of the step before."""
    declared_mbps = max(1.0, _number(link.capacity_mbps) or 1.0)
    if before is None or before.declared_mbps != declared_mbps:  # never measured, or declared anew
        before = LinkView(
            cluster=link.cluster,
            declared_mbps=declared_mbps,
            effective_mbps=declared_mbps,
            measured_at_seconds=now_seconds,
        )
    instances_heard = _instances_heard(link.sample, stale_after_seconds)
    heard = link.sample is not None and link.sample.age_seconds <= stale_after_seconds
    if hub_measured and before.instances_seen and not instances_heard:
        heard = False
    heard_at_seconds = now_seconds if heard else before.heard_at_seconds
    silent = hub_measured and now_seconds - heard_at_seconds > SILENT_AFTER_SECONDS
    state = _link_state(link, silent=silent)
    view = replace(
        before,
        state=state,
        heard_at_seconds=heard_at_seconds,
        instances_seen=before.instances_seen or instances_heard,
        link_percent=None,
    )
    if state != "Alive":  # its clock starts again when it comes back: it was not expected to be measured meanwhile
        return replace(view, measured_at_seconds=now_seconds, unsent_bytes=0.0, waiting_per_instance=0.0)
    sample = usable(link.sample)
    if (
        sample is None
        or sample.traffic_mbps is None
        or not heard
        or sample.sampled_at_seconds == before.sampled_at_seconds
    ):
        return view
    effective_mbps = effective_capacity_mbps(sample, declared_mbps, before.effective_mbps)
    utilisation = min(MAX_PERCENT, 100.0 * max(sample.traffic_mbps / effective_mbps, sample.backlogged_fraction))
    drain_seconds = sample.unsent_bytes * 8 / 1e6 / effective_mbps
    return replace(
        view,
        effective_mbps=effective_mbps,
        utilisation_percent=utilisation,
        sampled_at_seconds=sample.sampled_at_seconds,
        measured_at_seconds=now_seconds,
        heard_at_seconds=now_seconds,
        unsent_bytes=sample.unsent_bytes,
        link_percent=max(utilisation, 100.0 * drain_seconds / SATURATED_DRAIN_SECONDS),
        waiting_per_instance=sample.waiting_prefills / link.ready_instances,
    )


def _instances_heard(sample: LinkSample | None, stale_after_seconds: int) -> bool:
    age_seconds = sample.instances_age_seconds if sample is not None else None
    return age_seconds is not None and age_seconds <= stale_after_seconds


def _link_state(link: LinkFacts, *, silent: bool) -> LinkState:
    if not link.reachable:
        return "Unreachable"
    if link.ready_instances < 1:
        return "NoReadyInstance"
    return "Silent" if silent else "Alive"


def effective_capacity_mbps(sample: LinkSample, declared_mbps: float, held_mbps: float) -> float:
    """Return what the link can carry now, at most what was declared; `sample` is usable and has a traffic.

    While data waits it is the rate of delivery plus what others carry over the same link (traffic beyond our own data
    that waited), else the held estimate, probed upward. A link that delivers nothing keeps a thousandth.
    """
    traffic_mbps = sample.traffic_mbps or 0.0
    if sample.delivery_mbps is not None and sample.backlogged_fraction >= MIN_BACKLOGGED_FRACTION:
        others_mbps = max(0.0, traffic_mbps - sample.delivery_mbps * sample.backlogged_fraction)
        collapsed_mbps = _collapsed(sample)
        seen_mbps = others_mbps + (sample.delivery_mbps if collapsed_mbps is None else collapsed_mbps)
    elif sample.unsent_bytes > 0:
        seen_mbps = held_mbps  # data waits, but the window has not seen it move yet
    else:
        seen_mbps = max(held_mbps * PROBE_FACTOR, traffic_mbps)
    # Never 0, since utilisation and drain divide by it; and an estimate of 0 could not be probed upward.
    return min(declared_mbps, max(seen_mbps, declared_mbps / 1000))


def _collapsed(sample: LinkSample) -> float | None:
    """Return what the latest scrapes say when the link has collapsed since the window began; else None."""
    latest_mbps = sample.latest_delivery_mbps
    if latest_mbps is None or sample.latest_backlogged_fraction < MIN_COLLAPSED_FRACTION:
        return None
    return latest_mbps if latest_mbps < COLLAPSE_SHARE * (sample.delivery_mbps or 0.0) else None


def usable(sample: LinkSample | None) -> LinkSample | None:
    """Return the sample with every figure either sensible or absent; None when it says nothing of its own time."""
    if sample is None or not math.isfinite(sample.sampled_at_seconds) or not math.isfinite(sample.age_seconds):
        return None
    delivery_mbps = _number(sample.delivery_mbps)
    backlogged_fraction = _share(sample.backlogged_fraction)
    traffic_mbps = _number(sample.traffic_mbps)
    if traffic_mbps is not None and delivery_mbps is not None:  # what our own counters saw leave was there
        traffic_mbps = max(traffic_mbps, delivery_mbps * backlogged_fraction)
    return replace(
        sample,
        traffic_mbps=traffic_mbps,
        delivery_mbps=delivery_mbps,
        backlogged_fraction=backlogged_fraction,
        latest_delivery_mbps=_number(sample.latest_delivery_mbps),
        latest_backlogged_fraction=_share(sample.latest_backlogged_fraction),
        unsent_bytes=_number(sample.unsent_bytes) or 0.0,
        waiting_prefills=_number(sample.waiting_prefills) or 0.0,
    )


def _number(value: float | None) -> float | None:
    """Return a finite figure of at least 0, or None."""
    return value if value is not None and math.isfinite(value) and value >= 0 else None


def _share(value: float) -> float:
    return min(1.0, _number(value) or 0.0)
