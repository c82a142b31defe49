"""Looks into the Secrets that a pool's pods would read, for what none of them may read (`plan.member.check_content`).

The operator can look only into Secrets of the hub's namespace. A Secret of another cluster is another one, whatever its
name is. But a MemberCluster may be the hub's own namespace by another address: the ConfigMap that Kubernetes puts into
each namespace tells them apart, at each look. A Secret that was looked into and opens nothing is not read again for a
while, unless a MemberCluster begins to name another key of it.
"""

import time
from collections.abc import Callable
from typing import Final

from prfaas.api.template import PodTemplate
from prfaas_operator.clusters.client import ClusterClient
from prfaas_operator.clusters.kinds import CONFIG_MAP, ROOT_CA, SECRET
from prfaas_operator.controller.hub import HubView
from prfaas_operator.plan.member import check_content, read_by

AGAIN_SECONDS: Final = 300.0


class ContentCheck:
    """Remembers for how long each Secret of the hub counts as harmless, with the keys of it that are kubeconfigs."""

    def __init__(self, hub: HubView, clock: Callable[[], float] = time.monotonic):
        self._hub, self._clock = hub, clock
        self._harmless_until: dict[tuple[str, frozenset[str]], float] = {}

    async def check(self, template: PodTemplate, cluster: ClusterClient) -> None:
        """Look into the Secrets that pods of a template read in a cluster.

        Raises ForbiddenSecretError: one of them opens a cluster or gateways, or signs certificates.
        """
        now = self._clock()
        self._harmless_until = {known: until for known, until in self._harmless_until.items() if now < until}
        named = self._hub.kubeconfig_keys()
        looks = {
            (name, frozenset(key for secret, key in named if secret == name)): where
            for name, where in read_by(template)
        }
        unknown = {look: where for look, where in looks.items() if look not in self._harmless_until}
        if not unknown or not await self._is_hub(cluster):
            return
        for look, where in unknown.items():
            secret = await self._hub.client.get(SECRET, look[0])
            if secret is not None:
                check_content(secret, where, named)
                self._harmless_until[look] = now + AGAIN_SECONDS

    async def _is_hub(self, cluster: ClusterClient) -> bool:
        """Return true if a cluster is the hub's namespace, by whatever address, or may be."""
        if cluster is self._hub.client:
            return True
        here, there = await self._hub.client.get(CONFIG_MAP, ROOT_CA), await cluster.get(CONFIG_MAP, ROOT_CA)
        return here is None or there is None or here["metadata"]["uid"] == there["metadata"]["uid"]
