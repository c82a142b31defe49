"""An issuer's certificate for one holder: applies cert-manager's Certificate, and reads the Secret that it fills."""

from collections.abc import Mapping
from datetime import datetime
from typing import NamedTuple

from prfaas.errors import PrfaasError
from prfaas.identity import CLOCK_SKEW, PeerRules
from prfaas.names import HUB, TLS_TRUSTED
from prfaas_operator.clusters.client import ClusterClient
from prfaas_operator.clusters.kinds import SECRET, Object
from prfaas_operator.plan import certificates_read as read
from prfaas_operator.plan.certificates import GATEWAYS, Leaf
from prfaas_operator.plan.drift import view
from prfaas_operator.render import certificates as render


class Issued(NamedTuple):
    """The issuer's certificate for one cluster; without `leaf`, `problem` says why none is usable yet."""

    leaf: Leaf | None = None
    secret: Object | None = None
    problem: str = ""


async def ask_issuer(
    hub: ClusterClient, name: str, known: Mapping[str, Object], wanted: Object, peers: PeerRules
) -> Issued:
    """Apply the Certificate of one holder if it differs; `known` are the present ones by name."""
    live = known.get(wanted["metadata"]["name"])
    if live is None or view(live["spec"], wanted["spec"]) != wanted["spec"]:
        live = await hub.apply(wanted)
    secret = await hub.get(SECRET, render.issued_secret(name))
    if secret is None:
        return Issued(problem=_why_pending(live))
    try:
        if not read.content(secret, TLS_TRUSTED).strip():
            return Issued(problem=f"the issuer gives no {TLS_TRUSTED}; choose an issuer that publishes its authority")
        return Issued(read.read_issued(secret, peers, hub.now()), secret)
    except PrfaasError as error:
        return Issued(problem=f"Secret {render.issued_secret(name)}: {error}")


def why_apart(instances: datetime | None, gateways: datetime | None) -> str:
    """Return a warning if the hub's two certificates end apart, empty otherwise: an issuer renews each by itself."""
    if instances is None or gateways is None or abs(instances - gateways) <= CLOCK_SKEW:
        return ""
    names = f"{render.certificate_name(HUB)} {render.certificate_name(GATEWAYS)}"
    return (
        f"certificates: that of the hub's instances ends at {instances:%F %R} UTC and that of its gateways at "
        f"{gateways:%F %R}; if nobody renews them, the hub serves no request between the two. Renew both at one time: "
        f"cmctl renew {names}"
    )


def _why_pending(certificate: Object) -> str:
    """Return why a Certificate has not been issued, in cert-manager's words."""
    conditions = (certificate.get("status") or {}).get("conditions") or ()
    ready = next((one for one in conditions if one.get("type") == "Ready"), {})
    what = f"Certificate {certificate['metadata']['name']} is not issued yet"
    return f"{what}: {ready['message']}" if ready.get("message") else what
