"""Messages on the unix socket between a gateway and its scheduler sidecar.

GET  /table      -> RoutingTable (JSON), 503 before the first one
PUT  /threshold  <- ThresholdUpdate
GET  /counters   -> Counters
"""

from typing import Literal

import msgspec

from prfaas.wire.profile import PoolProfile, Profile

Bandwidth = Literal["Scarce", "Abundant"]


class Price(msgspec.Struct, frozen=True, kw_only=True):
    """A cluster's price of a prompt: the mean profile of its prefill instances, and the capacity of its link."""

    cluster: str
    """HUB: prefilled in the hub."""
    profile: Profile
    link_mbps: float = 0.0
    """Effective capacity toward the hub; 0 for the hub itself."""


class LinkReport(msgspec.Struct, frozen=True, kw_only=True):
    """One link as the scheduler sees it, for people to look at: no decision is made by it."""

    cluster: str
    state: str
    """Alive, or why no prompt is offloaded over it, as `prfaas.routing.links.LinkState` has it."""
    effective_mbps: float
    utilisation_percent: float | None
    """Share of the effective capacity; None: never measured."""


class ThresholdUpdate(msgspec.Struct, frozen=True, kw_only=True):
    """The scheduler's rule for the gateway from now on.

    `offload_clusters` names the clusters whose link is alive; without any, nothing is offloaded. The gateway drops the
    update after `expires_seconds` without a newer one, and returns to the routing table's own threshold.
    """

    tokens: int
    bandwidth: Bandwidth
    offload_clusters: tuple[str, ...]
    expires_seconds: int
    reason: str
    prices: tuple[Price, ...] = ()
    """By cluster, in mode Priced; empty: the threshold decides."""
    links: tuple[LinkReport, ...] = ()
    profiles: tuple[PoolProfile, ...] = ()
    """Of all measured pools, for instances that do not answer with a profile themselves."""


class PrefillTokens(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of the prompts that one side prefills. The sums differ where the chosen instance lacks a cached prefix."""

    counted: int = 0
    """Incremental tokens, as `Counters.lengths` counts them."""
    computed: int = 0
    """Tokens that the chosen instance has to compute."""


class Counters(msgspec.Struct, frozen=True, kw_only=True):
    """The gateway's counters since its start."""

    offloaded: int
    local: int
    failed_offloads: int
    lengths: tuple[int, ...] = ()
    """Prompts by incremental length, in the bins of `prfaas.routing.lengths.EDGES`; empty: not counted."""
    offloaded_tokens: PrefillTokens = PrefillTokens()
    local_tokens: PrefillTokens = PrefillTokens()
