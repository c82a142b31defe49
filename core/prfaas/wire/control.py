"""Messages on the unix socket between a gateway and its scheduler sidecar.

GET  /table      -> RoutingTable (JSON), 503 before the first one
PUT  /threshold  <- ThresholdUpdate
GET  /counters   -> Counters
"""

from typing import Literal

import msgspec

Bandwidth = Literal["Scarce", "Abundant"]


class ThresholdUpdate(msgspec.Struct, frozen=True, kw_only=True):
    """What the scheduler wants the gateway to route by from now on.

    `offload_clusters` names the clusters whose link is alive: none means that nothing is offloaded. The gateway drops
    the update when no newer one came for `expires_seconds` and goes back to the routing table's own threshold.
    """

    tokens: int
    bandwidth: Bandwidth
    offload_clusters: tuple[str, ...]
    expires_seconds: int
    reason: str


class Counters(msgspec.Struct, frozen=True, kw_only=True):
    """Counted by the gateway since its start: decisions made, and requests still in flight by decision."""

    offloaded: int
    local: int
    failed_offloads: int
    in_flight_offloads: int
    in_flight_local: int
