"""Who has to look again. An event says only that: what is true is read anew by the reconcile it wakes."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, NamedTuple

from prfaas_operator import metrics
from prfaas_operator.clusters.api import Kind

STUCK_SECONDS: Final = 300.0
"""A look at one object takes this long only when it never ends: every call in it has a timeout of seconds."""


class Ref(NamedTuple):
    """One custom resource of the hub's namespace."""

    kind: Kind
    name: str

    def __str__(self) -> str:
        return f"{self.kind.name} {self.name}"


class Waker:
    """Wakes one object's loop. `turn` is held by the one task that reconciles the object at a time."""

    def __init__(self, kind: str) -> None:
        self.event = asyncio.Event()
        self.turn = asyncio.Lock()
        self.looking_since: float | None = None
        self._kind = kind
        self._woken_at = time.monotonic()

    def wake(self) -> None:
        """Have the object looked at again."""
        if not self.event.is_set():
            self._woken_at = time.monotonic()
            self.event.set()

    @contextmanager
    def looking(self) -> Iterator[None]:
        """Look at the object; whatever wakes it from here on needs another look."""
        now = time.monotonic()
        if self.event.is_set():
            metrics.QUEUE_WAIT_SECONDS.labels(self._kind).observe(now - self._woken_at)
            self.event.clear()
        self.looking_since = now
        try:
            yield
        finally:
            self.looking_since = None

    async def wait(self, timeout_seconds: float) -> None:
        """Wait until woken, or for as long as the resync allows."""
        try:
            async with asyncio.timeout(timeout_seconds):
                await self.event.wait()
        except TimeoutError:
            return


class Wakers:
    """The wakers of all objects that are being kept."""

    def __init__(self) -> None:
        self._wakers: dict[Ref, Waker] = {}
        self._by_uid: dict[str, Ref] = {}
        metrics.QUEUE_DEPTH.set_function(self.depth)

    def of(self, ref: Ref, uid: str) -> Waker:
        """Return the waker of an object, made on first use."""
        self._by_uid[uid] = ref
        if ref not in self._wakers:
            self._wakers[ref] = Waker(ref.kind.name)
        return self._wakers[ref]

    def wake(self, ref: Ref) -> None:
        """Wake one object, if it is being kept."""
        if ref in self._wakers:
            self._wakers[ref].wake()

    def wake_uid(self, uid: str) -> None:
        """Wake the object with this uid, if it is being kept."""
        if uid in self._by_uid:
            self.wake(self._by_uid[uid])

    def wake_kinds(self, *kinds: Kind) -> None:
        """Wake all objects of some kinds."""
        for ref in self._wakers:
            if ref.kind in kinds:
                self.wake(ref)

    def forget(self, ref: Ref, uid: str) -> None:
        """Drop the waker of an object that is gone."""
        self._by_uid.pop(uid, None)
        self._wakers.pop(ref, None)

    def depth(self) -> int:
        """Return how many objects wait to be looked at."""
        return sum(waker.event.is_set() for waker in self._wakers.values())

    def stuck(self) -> str:
        """Name an object whose reconcile does not end; empty when there is none."""
        now = time.monotonic()
        for ref, waker in self._wakers.items():
            if waker.looking_since is not None and now - waker.looking_since > STUCK_SECONDS:
                return f"{ref} has been reconciled for {now - waker.looking_since:.0f} s"
        return ""
