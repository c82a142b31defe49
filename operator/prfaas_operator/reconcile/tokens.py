"""Renew the token of a member cluster's kubeconfig at half its life, with the very rights that it gives.

Only in a Secret that `prfaas cluster join` made: one that somebody else keeps would be put back, or fought over. The
old token works on until its own end, so that nothing hangs on the moment at which the Secret is written.
"""

import base64
import logging
import time
from typing import Final

from prfaas import names
from prfaas.api import MemberCluster
from prfaas.errors import PrfaasError
from prfaas_operator.clusters.api import SECRET, Cluster, Object
from prfaas_operator.errors import ConflictError
from prfaas_operator.plan import kubeconfig
from prfaas_operator.plan.tokens import SECONDS_PER_DAY, TokenFacts, is_due, read
from prfaas_operator.reconcile import events
from prfaas_operator.reconcile.reading import read as read_resource
from prfaas_operator.render.account import MADE_BY_JOIN

log = logging.getLogger(__name__)

PAUSE_SECONDS: Final = 60.0
"""A renewal that was refused is tried again this much later."""


class Renewals:
    """Renews tokens when they are due.

    Args:
        token_days: how long new tokens are asked for.

    """

    def __init__(self, token_days: int):
        self._token_seconds = token_days * SECONDS_PER_DAY
        self._not_before: dict[str, float] = {}

    async def renew(self, hub: Cluster, there: Cluster, live: Object, secret: Object, token: TokenFacts) -> None:
        """Replace a member's token in its Secret where that is due; a refusal becomes an Event.

        Args:
            hub, there: the hub, and the member with its present token.
            live, secret: the MemberCluster, and the Secret with its kubeconfig.
            token: what the present token says of itself.

        """
        member = read_resource(MemberCluster, live)
        name = member.metadata.name
        if not (_is_ours(secret) and token.namespace == there.namespace and is_due(token, there.now())):
            return
        if time.monotonic() < self._not_before.get(name, 0.0):
            return
        try:
            fresh = await there.create_token(token.account, self._token_seconds)
            await _store(hub, secret, member.spec.kubeconfig_secret_ref.key, fresh)
        except ConflictError:
            return  # somebody wrote the Secret in between, we ourselves perhaps: the next look finds it as it is then
        except PrfaasError as error:
            self._not_before[name] = time.monotonic() + PAUSE_SECONDS
            await events.post(hub, live, "Warning", "TokenNotRenewed", f"{error}; `prfaas cluster join {name}` helps")
            return
        granted = read(fresh)
        log.info("MemberCluster %s: new token until %s", name, granted.expires_at if granted else "further notice")


def _is_ours(secret: Object) -> bool:
    labels = secret["metadata"].get("labels") or {}
    return labels.get(names.LABEL_MANAGED_BY) == MADE_BY_JOIN


async def _store(hub: Cluster, secret: Object, key: str, token: str) -> None:
    """Write a token into a Secret as it was read; ConflictError when somebody changed it in between.

    A merge patch, because an apply would make the data ours, and our apply of the finalizer would then remove it.
    """
    document = kubeconfig.with_token(base64.b64decode(secret["data"][key]), token)
    patch = {
        "metadata": {"resourceVersion": secret["metadata"]["resourceVersion"]},
        "data": {key: base64.b64encode(document).decode()},
    }
    await hub.merge(SECRET, secret["metadata"]["name"], patch)
