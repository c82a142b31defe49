"""Certificates by reference to an issuer of cert-manager: ask for one per cluster in the hub, and read what came.

The issuer renews them and chooses their authority. Its Secrets stay in the hub; what instances mount are copies, which
change only when everybody can judge them.
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from prfaas import identity
from prfaas.errors import PrfaasError
from prfaas_operator.clusters.api import CERTIFICATE, SECRET, Cluster, Object
from prfaas_operator.plan import certificates_read as read
from prfaas_operator.plan.certificates import Leaf, Terms
from prfaas_operator.plan.certificates_settings import Issuer
from prfaas_operator.plan.drift import view
from prfaas_operator.render import certificates as render
from prfaas_operator.render.common import GROUP_MANAGED


class Issued(NamedTuple):
    """What an issuer has for one cluster; without `leaf`, `problem` says why that is nothing yet."""

    leaf: Leaf | None
    secret: Object | None
    problem: str = ""


async def gather(hub: Cluster, names: Iterable[str], issuer: Issuer, terms: Terms) -> Mapping[str, Issued]:
    """Ask for a certificate for each cluster, and return what there is.

    Raises:
        InvalidObjectError: cert-manager is not installed.

    """
    known = {one["metadata"]["name"]: one for one in await hub.list_all(CERTIFICATE, selector=GROUP_MANAGED)}
    return {name: await _one(hub, name, known, render.certificate(name, issuer, terms.life)) for name in names}


async def _one(hub: Cluster, name: str, known: Mapping[str, Object], manifest: Object) -> Issued:
    live = known.get(manifest["metadata"]["name"])
    if live is None or view(live["spec"], manifest["spec"]) != manifest["spec"]:
        live = await hub.apply(manifest)
    secret = await hub.get(SECRET, render.issued_secret(name))
    if secret is None:
        return Issued(None, None, _waiting(live))
    try:
        if not read.content(secret, read.TRUSTED).strip():
            return Issued(None, None, f"the issuer gives no {read.TRUSTED}; take one that tells its authority")
        return Issued(read.read_issued(secret, hub.now()), secret)
    except PrfaasError as error:
        return Issued(None, None, f"Secret {render.issued_secret(name)}: {error}")


def _waiting(certificate: Object) -> str:
    """Return why a Certificate has not been issued, in cert-manager's words."""
    conditions = (certificate.get("status") or {}).get("conditions") or ()
    ready = next((one for one in conditions if one.get("type") == "Ready"), {})
    what = f"Certificate {certificate['metadata']['name']} is not issued yet"
    return f"{what}: {ready['message']}" if ready.get("message") else what


def authorities(issued: Mapping[str, Issued]) -> dict[str, bytes]:
    """Return the authorities of everything that was issued, by fingerprint."""
    found: dict[str, bytes] = {}
    for one in issued.values():
        if one.leaf is not None and one.secret is not None:
            known = identity.fingerprints(read.content(one.secret, read.TRUSTED))
            found[one.leaf.authority] = known[one.leaf.authority]
    return found


def why_not(issued: Mapping[str, Issued]) -> str:
    """Return the first reason why something was not issued."""
    return next((one.problem for one in issued.values() if one.problem), "nothing has been issued yet")
