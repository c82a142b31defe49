"""Writes the policy's status: one replica of many, as often as it says something new, and never in the way of the loop.

Whoever holds the Lease `<policy>-scheduler` writes. A change of threshold, bandwidth or condition is written at once,
but not twice within two seconds; the figures alone every ten, changed or not, so that what somebody else removed comes
back. An API server that is down costs a late status and nothing else.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from prfaas.errors import PeerError, PrfaasError
from prfaas.kube import KubeSession, LeaseHolder, ObjectKind, ObjectRef, apply_status
from prfaas.names import API_VERSION, FIELD_MANAGER_SCHEDULER
from prfaas.util import LogOnce
from prfaas_scheduler import status

log = logging.getLogger(__name__)

TICK_SECONDS = 0.5
RENEW_SECONDS = 3.0
LEASE_SECONDS = 15
MIN_WRITE_SECONDS = 2.0
MAX_WRITE_SECONDS = 10.0
TIMEOUT_SECONDS = 5.0
POLICY = ObjectKind(API_VERSION, "PrfaaSPolicy", "prfaaspolicies")


def lease_name(policy: str) -> str:
    """Return the name of the Lease that a policy's schedulers share."""
    return f"{policy}-scheduler"


class Publisher:
    """One candidate for writing the status of one policy.

    Args:
        session: with the API server; its account may get and patch the policy's status, and get and update the
            Lease.
        policy: which PrfaaSPolicy.
        identity: this replica's name.
        latest: returns the report as it stands.
        clock: monotonic seconds.

    """

    def __init__(
        self,
        session: KubeSession,
        policy: ObjectRef,
        identity: str,
        latest: Callable[[], status.Report | None],
        clock: Callable[[], float] = time.monotonic,
    ):
        self._session = session
        self._policy = policy
        self._latest = latest
        self._clock = clock
        self._lease = LeaseHolder(
            session, policy.namespace, lease_name(policy.name), identity, duration_seconds=LEASE_SECONDS, clock=clock
        )
        self._failures = LogOnce(log)
        self._renew_at = float("-inf")
        self._written: status.Report | None = None
        self._written_at = float("-inf")
        self._conditions: Sequence[Mapping[str, Any]] | None = None
        """As they stand in the object; None: to be read first."""

    async def run(self) -> None:
        """Write until cancelled, then give the Lease up."""
        try:
            while True:
                await self.once()
                await asyncio.sleep(TICK_SECONDS)
        finally:
            await self._lease.release()

    async def once(self) -> None:
        """Renew the Lease and write the status, where either is due. Failures are logged and tried again."""
        try:
            await self._keep_lease()
            said = self._latest()
            if self._lease.is_holder and said is not None and self._due(said):
                await self._write(said)
        except PrfaasError as error:
            what = f"writing the status of {self._policy}"
            self._failures.failed(what, f"{what} failed: {error}", reason=type(error))

    async def _keep_lease(self) -> None:
        if self._clock() < self._renew_at:
            return
        self._renew_at = self._clock() + RENEW_SECONDS
        was_holder = self._lease.is_holder
        if await self._lease.acquire_or_renew(TIMEOUT_SECONDS) and not was_holder:
            self._conditions = self._written = None  # another replica may have written meanwhile

    def _due(self, said: status.Report) -> bool:
        age_seconds = self._clock() - self._written_at
        if age_seconds >= MAX_WRITE_SECONDS:
            return True
        turned = self._written is None or self._written.turning_points != said.turning_points
        return turned and age_seconds >= MIN_WRITE_SECONDS

    async def _write(self, said: status.Report) -> None:
        self._written_at = self._clock()  # also when it fails: a server in trouble is not asked twice a second
        known = await self._read_conditions() if self._conditions is None else self._conditions
        body = status.body(said, known, datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"))
        try:
            await apply_status(
                self._session,
                self._policy,
                body,
                field_manager=FIELD_MANAGER_SCHEDULER,
                timeout_seconds=TIMEOUT_SECONDS,
            )
        except PeerError:
            self._conditions = None  # it may have been written all the same
            raise
        self._conditions, self._written = body["conditions"], said
        self._failures.worked(f"writing the status of {self._policy}")

    async def _read_conditions(self) -> Sequence[Mapping[str, Any]]:
        current = await self._session.call("GET", f"{self._policy.path}/status", timeout_seconds=TIMEOUT_SECONDS)
        return (current.get("status") or {}).get("conditions") or []


def policy_ref(namespace: str, name: str) -> ObjectRef:
    """Return the reference of a PrfaaSPolicy."""
    return ObjectRef(POLICY, namespace, name)
