"""The reconcile queue: the objects that need a reconcile. An event only wakes an object and carries no facts."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, NamedTuple

from prfaas.kube.session import ObjectKind
from prfaas_operator import metrics

STUCK_SECONDS: Final = 300.0
"""Only a reconcile that never ends takes this long: every call in it has a timeout of seconds."""


class Ref(NamedTuple):
    """One custom resource of the hub's namespace."""

    kind: ObjectKind
    name: str

    def __str__(self) -> str:
        return f"{self.kind.name} {self.name}"


class Waker:
    """Wakes one object's loop. Only one task at a time holds `turn` and reconciles the object."""

    def __init__(self, kind: str) -> None:
        self.event = asyncio.Event()
        self.turn = asyncio.Lock()
        self.reconciling_since: float | None = None
        self._kind = kind
        self._woken_at = time.monotonic()

    def wake(self) -> None:
        if not self.event.is_set():
            self._woken_at = time.monotonic()
            self.event.set()

    @contextmanager
    def reconciling(self) -> Iterator[None]:
        """Hold the object's turn; every wake-up from here on requests another reconcile."""
        now = time.monotonic()
        if self.event.is_set():
            metrics.QUEUE_WAIT_SECONDS.labels(self._kind).observe(now - self._woken_at)
            self.event.clear()
        self.reconciling_since = now
        try:
            yield
        finally:
            self.reconciling_since = None

    async def wait(self, timeout_seconds: float) -> bool:
        """Wait until woken, or until the resync; return true if woken."""
        try:
            async with asyncio.timeout(timeout_seconds):
                return await self.event.wait()
        except TimeoutError:
            return False


class ReconcileQueue:
    """The wakers of all objects in the cluster."""

    def __init__(self) -> None:
        self._wakers: dict[Ref, Waker] = {}
        self._by_uid: dict[str, Ref] = {}
        metrics.QUEUE_DEPTH.set_function(self.depth)

    def of(self, ref: Ref, uid: str) -> Waker:
        """Return the waker of an object, made at its first use."""
        self._by_uid[uid] = ref
        if ref not in self._wakers:
            self._wakers[ref] = Waker(ref.kind.name)
        return self._wakers[ref]

    def wake(self, ref: Ref) -> None:
        if ref in self._wakers:
            self._wakers[ref].wake()

    def wake_uid(self, uid: str) -> None:
        if uid in self._by_uid:
            self.wake(self._by_uid[uid])

    def wake_kinds(self, *kinds: ObjectKind) -> None:
        for ref in self._wakers:
            if ref.kind in kinds:
                self.wake(ref)

    def forget(self, ref: Ref, uid: str) -> None:
        """Drop the waker of a deleted object, unless a new object of that name waits for it."""
        self._by_uid.pop(uid, None)
        if ref not in self._by_uid.values():
            self._wakers.pop(ref, None)

    def clear(self) -> None:
        self._wakers.clear()
        self._by_uid.clear()

    def depth(self) -> int:
        return sum(waker.event.is_set() for waker in self._wakers.values())

    def stuck(self) -> str:
        """Return a sentence about an object whose reconcile does not end; empty if there is none."""
        now = time.monotonic()
        for ref, waker in self._wakers.items():
            if waker.reconciling_since is not None and now - waker.reconciling_since > STUCK_SECONDS:
                return f"{ref} has been reconciled for {now - waker.reconciling_since:.0f} s"
        return ""
