"""Holds a coordination.k8s.io Lease, so that only one of several replicas writes.

Clocks of two machines are never compared. A replica takes a Lease when its record has not changed for its duration on
the replica's own monotonic clock. A holder without a successful renewal stops after two thirds of the duration, before
another replica may take the Lease.
"""

import contextlib
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, Final

from prfaas.errors import ConfigError, PeerError
from prfaas.kube.session import KubeSession, Object, ObjectKind, ObjectRef, StatusError

LEASE_KIND: Final = ObjectKind("coordination.k8s.io/v1", "Lease", "leases")
LEASE_SECONDS: Final = 15
HELD_SECONDS: Final = LEASE_SECONDS * 2 / 3
CALL_SECONDS: Final = 4.0
"""A renewal is two calls, so one that begins in time ends before the Lease is lost, also on a busy server."""
RELEASE_SECONDS: Final = 2.0
CONFLICT = 409
NEVER: Final = float("-inf")


class LeaseHolder:
    """A candidate for one Lease. Call `acquire_or_renew` every few seconds; act only while `is_holder`.

    The account of `session` needs get, create and update on leases. `identity` is this replica's name, for example the
    pod's. `renewed_at` is the time of the last renewal.
    """

    def __init__(
        self,
        session: KubeSession,
        namespace: str,
        name: str,
        identity: str,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._session = session
        self._ref = ObjectRef(LEASE_KIND, namespace, name)
        self._identity = identity
        self._clock = clock
        self._seen: tuple[Any, ...] | None = None
        self._seen_at = 0.0
        self._held_until = NEVER
        self.renewed_at = NEVER

    @property
    def is_holder(self) -> bool:
        return self._clock() < self._held_until

    async def acquire_or_renew(self) -> bool:
        """Take or renew the Lease if possible, and return `is_holder`; raises PeerError, which loses no held Lease."""
        started = self._clock()
        lease = await self._session.find(self._ref.path, timeout_seconds=CALL_SECONDS) or {}
        if not self._may_take(lease.get("spec") or {}):
            self._held_until = NEVER
        elif await self._write(lease):
            # From before the calls: the others may have seen the new record from any moment since.
            self.renewed_at, self._held_until = started, started + HELD_SECONDS
        return self.is_holder

    async def release(self) -> None:
        """Give the Lease up, so that another replica need not wait. A failure is ignored: the Lease expires anyway."""
        if not self.is_holder:
            return
        self._held_until = NEVER
        with contextlib.suppress(PeerError, ConfigError):
            lease = await self._session.find(self._ref.path, timeout_seconds=RELEASE_SECONDS) or {}
            spec: Object = lease.get("spec") or {}
            if spec.get("holderIdentity") == self._identity:
                # As client-go: a duration of 0 is not valid, and without a holder nobody waits for it.
                free = {**lease, "spec": {**spec, "holderIdentity": "", "leaseDurationSeconds": 1}}
                await self._session.call("PUT", self._ref.path, body=free, timeout_seconds=RELEASE_SECONDS)

    def _may_take(self, spec: Object) -> bool:
        """Return whether the Lease is ours, free, or expired."""
        holder = spec.get("holderIdentity")
        seen = (holder, spec.get("renewTime"), spec.get("leaseTransitions"))
        if seen != self._seen:
            self._seen, self._seen_at = seen, self._clock()
        silent_seconds = self._clock() - self._seen_at
        duration_seconds = int(spec.get("leaseDurationSeconds") or LEASE_SECONDS)
        return not holder or holder == self._identity or silent_seconds >= duration_seconds

    async def _write(self, lease: Object) -> bool:
        """Write the Lease in our name; return False if it changed meanwhile."""
        # A MicroTime, which has exactly six digits behind the second.
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        old: Object = lease.get("spec") or {}
        is_ours = old.get("holderIdentity") == self._identity
        spec = {
            "holderIdentity": self._identity,
            "leaseDurationSeconds": LEASE_SECONDS,
            "renewTime": now,
            "acquireTime": old.get("acquireTime") if is_ours else now,
            "leaseTransitions": int(old.get("leaseTransitions") or 0) + (0 if is_ours or not lease else 1),
        }
        metadata = lease.get("metadata") or {"name": self._ref.name, "namespace": self._ref.namespace}
        body = {"apiVersion": LEASE_KIND.api_version, "kind": LEASE_KIND.name, "metadata": metadata, "spec": spec}
        # The resourceVersion inside metadata makes the update fail when the Lease changed since it was read.
        method, path = ("PUT", self._ref.path) if lease else ("POST", LEASE_KIND.path(self._ref.namespace))
        try:
            await self._session.call(method, path, body=body, timeout_seconds=CALL_SECONDS)
        except StatusError as error:
            if error.status != CONFLICT:
                raise
            return False
        return True
