"""Who may call what of an instance inside TLS: one table of endpoints and callers, which a reader sees at once.

A caller is what its certificate proves: a part of a cluster, or a buyer (`prfaas.identity`). Seen from an instance, it
is one of six. The API port asks the table for each request, the data port for each transfer and each reader of events.
Without TLS nobody is known, and nothing is asked.

The hub's gateways decide where prompts go, so they alone steer, control, and read what is cached. The hub's workers and
those of the instance's own cluster may use it: caches and answers go to the hub, or stay in their cluster. A member's
worker has no right at any other cluster. A buyer, who decodes on machines of its own, may have prompts prefilled, fetch
the caches by tokens that it chose, and read what a prefill costs. At its own instances it may do everything, and nobody
else anything. Whoever has no certificate gets probes and metrics.

The hub and the instance's own cluster may have all that an instance serves at a time, since often nobody else asks. A
buyer has half of it at most, and another member half of the connections, so that neither keeps them from anything.
"""

from enum import Enum
from typing import Final, NamedTuple

from prfaas.names import HUB
from prfaas.wire.kvevents import EVENTS_PATH

GATEWAY: Final = "gateway"
WORKER: Final = "worker"
PARTS: Final = (GATEWAY, WORKER)


BUYER: Final = "buyer/"
"""Begins a buyer's name where others have a cluster's. No cluster has such a name, so no buyer passes for one."""


class Identity(NamedTuple):
    """What a certificate proves. Without a part it is gateway and worker of its cluster. A buyer has the name
    BUYER + NAME and no part."""

    cluster: str
    part: str = ""

    @property
    def is_buyer(self) -> bool:
        return self.cluster.startswith(BUYER)

    def __str__(self) -> str:
        return f"cluster {self.cluster!r}" + (f", part {self.part!r}" if self.part else "")


class CallerKind(Enum):
    """A caller as an instance sees it. The value is how a sentence names it."""

    STRANGER = "callers without a certificate"
    OTHER_MEMBER = "another member cluster"
    BUYER = "buyers of prefills"
    NEIGHBOUR = "the instance's own cluster"
    HUB_WORKER = "workers of the hub"
    HUB_GATEWAY = "gateways of the hub"


TRANSFER: Final = "a cache transfer"
"""At the data port: the connection of a destination."""
STEER: Final = "kv_transfer_params"
"""In a body: the field that names where a cache comes from or goes to."""
PREFILLS: Final = "/v1/prefills"
"""Also in a body, for a whole prompt: the field that has it prefilled, and names no address."""
BY_BODY: Final = frozenset({"/v1/completions", "/v1/chat/completions"})
"""Paths that serve PREFILLS and STEER, too: the body says which of the three it asks for."""

COUNTED_PART: Final = 2
"""Of what all may have, a caller that is `counted_as` somebody may have half."""

_ANYBODY: Final = frozenset(CallerKind)
_USERS: Final = frozenset({CallerKind.NEIGHBOUR, CallerKind.HUB_WORKER, CallerKind.HUB_GATEWAY})
_READERS: Final = _USERS | {CallerKind.BUYER}
_WORKERS: Final = frozenset({CallerKind.NEIGHBOUR, CallerKind.HUB_WORKER})
_HUB: Final = frozenset({CallerKind.HUB_WORKER, CallerKind.HUB_GATEWAY})
_GATEWAYS: Final = frozenset({CallerKind.HUB_GATEWAY})

RIGHTS: Final = {
    "/health": _ANYBODY,
    "/healthz": _ANYBODY,
    "/readyz": _ANYBODY,
    "/metrics": _ANYBODY,
    "/openapi.json": _READERS,
    "/v1/models": _READERS,
    "/v1/profile": _READERS,
    "/tokenize": _USERS,
    "/detokenize": _USERS,
    "/v1/completions": _USERS,
    "/v1/chat/completions": _USERS,
    TRANSFER: _WORKERS | {CallerKind.BUYER},
    PREFILLS: _HUB | {CallerKind.BUYER},
    STEER: _GATEWAYS,
    EVENTS_PATH: _GATEWAYS,
    "/v1/role": _GATEWAYS,
    "/v1/egress": _GATEWAYS,
    "/v1/cache/reset": _GATEWAYS,
}
"""Who may call an endpoint. One that is not listed is for the hub's gateways, so that a new one is no gap."""


def callers_of(identity: Identity | None, own_cluster: str) -> frozenset[CallerKind]:
    """Return what a caller is to an instance of `own_cluster`; None is one without a certificate."""
    if identity is None:
        return frozenset({CallerKind.STRANGER})
    if own_cluster.startswith(BUYER):
        return _HUB if identity.cluster == own_cluster else frozenset({CallerKind.OTHER_MEMBER})
    if identity.is_buyer:
        return frozenset({CallerKind.BUYER})
    if identity.cluster != HUB:  # gateways run in the hub: a member's part means nothing
        return frozenset({CallerKind.NEIGHBOUR if identity.cluster == own_cluster else CallerKind.OTHER_MEMBER})
    return {"": _HUB, GATEWAY: _GATEWAYS, WORKER: frozenset({CallerKind.HUB_WORKER})}[identity.part]


def counted_as(identity: Identity, own_cluster: str) -> str:
    """Return the name under which a caller's connections, bodies and prefills count together at an instance of
    `own_cluster`; empty for the hub and the own cluster, who may have all."""
    return "" if callers_of(identity, own_cluster) & _USERS else identity.cluster


def home_of(own_cluster: str) -> str:
    """Return what the workers beside a gateway prove: the gateways of an installation run in its hub, and those of a
    buyer on its machines."""
    return own_cluster if own_cluster.startswith(BUYER) else HUB


def is_open(endpoint: str) -> bool:
    """Return True if an endpoint needs no certificate."""
    return CallerKind.STRANGER in RIGHTS.get(endpoint, _GATEWAYS)


def refusal(endpoint: str, identity: Identity | None, own_cluster: str) -> str:
    """Return why a caller may not use an endpoint of an instance of `own_cluster`; empty if it may."""
    allowed = RIGHTS.get(endpoint, _GATEWAYS)
    if allowed & callers_of(identity, own_cluster):
        return ""
    named = ", ".join(caller.value for caller in CallerKind if caller in allowed)
    shown = "the caller shows no certificate" if identity is None else f"the caller's certificate is of {identity}"
    return f"only {named} may use this, and {shown}"
