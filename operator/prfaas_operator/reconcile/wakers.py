"""Who has to look again. An event says only that: what is true is read anew by the reconcile it wakes."""

import asyncio
from typing import NamedTuple

from prfaas_operator.clusters.api import Kind


class Ref(NamedTuple):
    """One custom resource of the hub's namespace."""

    kind: Kind
    name: str

    def __str__(self) -> str:
        return f"{self.kind.name} {self.name}"


class Waker:
    """Wakes one object's loop. `turn` is held by the one task that reconciles the object at a time."""

    def __init__(self) -> None:
        self.event = asyncio.Event()
        self.turn = asyncio.Lock()

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

    def of(self, ref: Ref, uid: str) -> Waker:
        """Return the waker of an object, made on first use."""
        self._by_uid[uid] = ref
        return self._wakers.setdefault(ref, Waker())

    def wake(self, ref: Ref) -> None:
        """Wake one object, if it is being kept."""
        if ref in self._wakers:
            self._wakers[ref].event.set()

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
