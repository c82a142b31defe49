"""Buyers of prefills: certificates from the installation's authority, and their end.

The operator neither makes nor renews a buyer's certificate, because it reaches no machine of a buyer. What it has to
know of them is one entry of the authority's Secret, which these functions alone write, with the rights of the person
who runs them. So an authority is replaced only when a buyer's certificate came with the next one, or has ended.
"""

import asyncio
import base64
from collections.abc import Awaitable, Callable
from contextlib import suppress
from datetime import datetime, timedelta
from typing import Final, TypeVar

import msgspec

from prfaas import identity
from prfaas.errors import ConfigError
from prfaas.names import AUTHORITY_SECRET, GATEWAY_TLS_SECRET, TLS_CERT, TLS_KEY, TLS_SECRET, TLS_TRUSTED
from prfaas.rights import BUYER, Identity
from prfaas.util import Deadline
from prfaas_operator.clusters.client import ClusterClient
from prfaas_operator.clusters.connect import KubeContext, open_context
from prfaas_operator.clusters.kinds import SECRET, Object
from prfaas_operator.errors import ConflictError
from prfaas_operator.plan import certificates_read as read
from prfaas_operator.plan.certificates import SoldCertificate, Terms
from prfaas_operator.plan.certificates_read import Store

T = TypeVar("T")
POLL_SECONDS: Final = 0.3
TRIES: Final = 5
FILES: Final = (TLS_TRUSTED, TLS_KEY, TLS_CERT)
"""What a buyer gets: the authorities, its key and its certificate."""


async def sell(hub: KubeContext, name: str, life: timedelta) -> dict[str, bytes]:
    """Return the files of a new certificate for a buyer, who is known to the operator from then on.

    Raises ConfigError: there is no authority, or its key is not in the hub.
    """
    async with open_context(hub) as here:
        return await _again(lambda: _sell(here, name, life))


async def _sell(hub: ClusterClient, name: str, life: timedelta) -> dict[str, bytes]:
    live, store = await _authority(hub)
    who, now = Identity(BUYER + name), hub.now()
    if not store.authorities.signs:
        raise ConfigError(
            f"Secret {AUTHORITY_SECRET} has no key: have the issuer make a certificate with the URI "
            f"{identity.uri_of(who, store.domain)}"
        )
    pair = read.issue(store, who, now, Terms(life, life, timedelta()))
    facts = identity.check(pair.certificate, pair.key, store.bundle, now)
    sold = SoldCertificate(facts.authority, sorted(store.authorities.trusted), now, facts.validity.not_after)
    await _write(hub, live, store, name, sold.after(store.buyers.get(name)))
    return dict(zip(FILES, (store.bundle, pair.key, pair.certificate), strict=True))


async def cut_off(hub: KubeContext, name: str, wait_seconds: float) -> bool:
    """Have a buyer's certificates refused, also those that `prfaas certs buyer` made; return once the hub has the list:
    true if one of the buyer is known here.

    Raises ConfigError: the operator has not written it within `wait_seconds`.
    """
    async with open_context(hub) as here:
        since, is_known = await _again(lambda: _refuse(here, name))
        deadline = Deadline(wait_seconds)
        refused = (BUYER + name, since)
        while behind := [one for one in (TLS_SECRET, GATEWAY_TLS_SECRET) if not await _lists(here, one, refused)]:
            if deadline.is_over:
                raise ConfigError(
                    f"buyer {name} is marked, but Secret {behind[0]} does not list it after {wait_seconds:g} s; does "
                    "the operator run?"
                )
            await asyncio.sleep(POLL_SECONDS)
    return is_known


async def _refuse(hub: ClusterClient, name: str) -> tuple[datetime, bool]:
    """Record that a buyer is cut off; return since when, and whether a certificate of it is known."""
    live, store = await _authority(hub)
    now = hub.now()
    since = now.replace(microsecond=0)  # certificates know no parts of a second
    sold = store.buyers.get(name, SoldCertificate("", [], now, now))
    await _write(hub, live, store, name, sold._replace(refused_before=since))
    return since, name in store.buyers


async def _again(change: Callable[[], Awaitable[T]]) -> T:
    """Read the Secret and write it; all of it again where the operator, say, wrote it in between.

    Raises ConflictError: that happened at each of some tries.
    """
    for _ in range(TRIES - 1):
        with suppress(ConflictError):
            return await change()
    return await change()


async def _authority(hub: ClusterClient) -> tuple[Object, Store]:
    live = await hub.get(SECRET, AUTHORITY_SECRET)
    if live is None:
        where = f"namespace {hub.namespace}"
        raise ConfigError(f"Secret {AUTHORITY_SECRET} does not exist in {where}; does the operator issue certificates?")
    return live, read.read_store(live, hub.now())


async def _write(hub: ClusterClient, live: Object, store: Store, name: str, sold: SoldCertificate) -> None:
    """Write the entry of buyers with a changed one, without those whose certificate ended and who were not cut off.

    A merge of this entry alone: the operator's applies own the others, and drop none that is not theirs.
    """
    now = hub.now()
    kept = {name: one for name, one in store.buyers.items() if now < one.last_end or one.refused_before}
    entry = base64.b64encode(msgspec.json.encode({**kept, name: sold})).decode()
    version = {"resourceVersion": live["metadata"]["resourceVersion"]}
    await hub.merge(SECRET, AUTHORITY_SECRET, {"metadata": version, "data": {read.BUYERS: entry}})


async def _lists(hub: ClusterClient, secret: str, refused: tuple[str, datetime]) -> bool:
    """Return true if the holders of a Secret know whom they must refuse since when, or there is no such Secret."""
    live = await hub.get(SECRET, secret)
    return live is None or refused in read.revoked_by(live)
