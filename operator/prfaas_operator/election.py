"""Leader election: the replica that holds the Lease works; the others stand by and take over.

The hard part is to stop in time. A replica that was frozen or cut off still believes that it leads, while another
replica has taken over. Three deadlines after the last renewal keep the two from writing at once:

    10 s  every call that writes is refused (`may_write`, asked right before each write)
    14 s  a separate thread ends the process if its work has not ended: kopf writes finalizers with its own client,
          which does not ask `may_write`
    15 s  another replica may take the Lease; a call under way has ended by then, because its timeout is 5 s

A container that restarts under its pod's name continues at once: the name is unique, and its former holder is dead.
"""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import threading
import time
import uuid
from collections.abc import Awaitable, Callable
from typing import Final

from prfaas.errors import ConfigError, PeerError
from prfaas.kube import KubeSession, LeaseHolder
from prfaas.util import LogOnce
from prfaas_operator import metrics

log = logging.getLogger(__name__)

LEASE: Final = "prfaas-operator"
RENEW_SECONDS: Final = 2.0
STANDBY_SECONDS: Final = 1.0
HARD_END_SECONDS: Final = 14.0
POLL_SECONDS: Final = 0.25
HARD_END_CODE: Final = 70
GRACE_SECONDS: Final = 25.0
"""An orderly end takes half of this at most; a pod is killed 30 s after it was asked to end."""

LeaderWork = Callable[[asyncio.Event], Awaitable[None]]
"""Works until the event is set."""


class Shutdown:
    """Handles SIGTERM and SIGINT; `term` is the event that stops the present work."""

    def __init__(self) -> None:
        self.requested = asyncio.Event()
        self.term = asyncio.Event()

    def listen(self) -> None:
        """Install the handlers, also in place of the handlers that kopf installs at its start."""
        for each in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(each, self._ask)

    def _ask(self) -> None:
        if not self.requested.is_set():
            asyncio.get_running_loop().call_later(GRACE_SECONDS, self._end_hard)
        self.requested.set()
        self.term.set()

    def _end_hard(self) -> None:
        waiting = sorted(task.get_name() for task in asyncio.all_tasks())
        log.critical("asked to end %g s ago, and these tasks still run: %s; ending", GRACE_SECONDS, ", ".join(waiting))
        os._exit(HARD_END_CODE)


class Election:
    """One candidate. Every write asks `may_write` first, also a write that was prepared long before.

    `ready` is set once this replica leads or stands by.
    """

    def __init__(self, session: KubeSession, namespace: str, ready: asyncio.Event):
        identity = os.environ.get("POD_NAME") or f"{socket.gethostname()}_{uuid.uuid4().hex[:8]}"
        self._holder = LeaseHolder(session, namespace, LEASE, identity)
        self._ready = ready

    def may_write(self) -> bool:
        """Return true while no other replica can hold the Lease."""
        return self._holder.is_holder

    async def run(self, work: LeaderWork, shutdown: Shutdown) -> None:
        """Work whenever this replica leads, until the process is asked to end; then release the Lease."""
        try:
            while await self._stand_by(shutdown):
                lost = await self._lead(work, shutdown)
                if not lost:
                    return
        finally:
            await self._holder.release()

    async def _stand_by(self, shutdown: Shutdown) -> bool:
        """Wait until this replica leads; False if the process is asked to end before."""
        once = LogOnce(log)
        while not shutdown.requested.is_set():
            if await self._renew():
                return True
            self._ready.set()
            once.failed("lease", f"standing by: another replica holds the Lease {LEASE}", level=logging.INFO)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(shutdown.requested.wait(), STANDBY_SECONDS)
        return False

    async def _lead(self, work: LeaderWork, shutdown: Shutdown) -> bool:
        """Work while the Lease is renewed; return true if the Lease was lost, false if the process was asked to end."""
        log.info("leading: this replica holds the Lease %s", LEASE)
        shutdown.term = asyncio.Event()
        metrics.LEADER.set(1)
        ended = threading.Event()
        threading.Thread(target=self._watch, args=(ended,), name="lease-watch", daemon=True).start()
        renewing = asyncio.create_task(self._keep_renewed(shutdown.term))
        try:
            await work(shutdown.term)
            return renewing.done()
        finally:
            ended.set()
            renewing.cancel()
            await asyncio.gather(renewing, return_exceptions=True)
            metrics.LEADER.set(0)

    async def _keep_renewed(self, term: asyncio.Event) -> None:
        """Renew until the Lease is lost, then stop the work."""
        while True:
            await asyncio.sleep(RENEW_SECONDS)
            # A refusal can mean that another replica wrote the Lease in between: the second attempt shows it.
            if not (await self._renew() or self.may_write() or await self._renew()):
                break
        log.error("the Lease %s is lost: no more writes, standing by", LEASE)
        term.set()

    async def _renew(self) -> bool:
        try:
            return await self._holder.acquire_or_renew()
        except (PeerError, ConfigError) as error:  # a server that fails, or a token that cannot be read
            log.warning("the Lease %s cannot be renewed: %s", LEASE, error)
            return False

    def _watch(self, ended: threading.Event) -> None:
        """End the process where its event loop cannot: it is frozen, or its work does not stop."""
        while not ended.wait(POLL_SECONDS):
            if time.monotonic() > self._holder.renewed_at + HARD_END_SECONDS:
                log.critical("the Lease %s was lost %g s ago and the work still runs: ending", LEASE, HARD_END_SECONDS)
                os._exit(HARD_END_CODE)
