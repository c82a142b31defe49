"""Follows the event stream of one instance for as long as it is in the routing table, however that is sent (`Stream`).

A connection that ends, falls silent or says nonsense is made again, after a pause that grows up to half a minute. An
instance that has no such stream is asked again each minute. Taking in events never occupies the gateway for long: all
followers take turns, and rest three times as long as they worked.
"""

import asyncio
import logging
import random
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing
from typing import Final, Literal, Protocol

from prfaas.errors import PrfaasError, ProtocolError
from prfaas.wire.profile import PATH as PROFILE_PATH
from prfaas.wire.profile import Profile, read_profile
from prfaas.wire.routes import Instance
from prfaas_gateway.upstream import Upstream

log = logging.getLogger(__name__)

FIRST_PAUSE_SECONDS: Final = 0.25
LONGEST_PAUSE_SECONDS: Final = 30.0
SILENT_PAUSE_SECONDS: Final = 60.0
PROFILE_SECONDS: Final = 60.0
PROFILE_BYTES: Final = 64 << 10
TURN_SECONDS: Final = 0.002
REST_FACTOR: Final = 3
State = Literal["followed", "silent", "lost"]


class NoStreamError(ProtocolError):
    """This instance tells nothing of its cache, or not in our way."""


class Stream(Protocol):
    """What is followed: it knows where it is, and goes on from there with each new connection."""

    @property
    def tally(self) -> tuple[int, int, int]:
        """Batches and snapshots taken in, and gaps met, so far."""
        ...

    def portions(self) -> AsyncGenerator[Iterator[None], None]:
        """Follow one connection to its end: yield what is to be taken in, each time in portions.

        Raises:
            NoStreamError: there is no such stream.
            PrfaasError: the connection was lost, or says nonsense.
            TimeoutError: it fell silent.

        """
        ...


class Turns:
    """The right to take events in, one after the other."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._worked_seconds = 0.0

    async def take(self, portions: Iterator[None]) -> None:
        """Run all portions, with rests between."""
        async with self._lock:
            began = time.perf_counter()
            for _ in portions:
                worked = self._worked_seconds + time.perf_counter() - began
                if worked >= TURN_SECONDS:
                    self._worked_seconds = 0.0
                    await asyncio.sleep(REST_FACTOR * worked)
                    began = time.perf_counter()
            self._worked_seconds += time.perf_counter() - began


class Follower:
    """Follows one instance.

    Args:
        instance: whom.
        stream: its events.
        upstream: reaches it.
        turns: those of all followers.
        on_change: called whenever `state` changes or frames were taken in.

    """

    def __init__(
        self,
        instance: Instance,
        stream: Stream,
        upstream: Upstream,
        turns: Turns,
        on_change: Callable[["Follower"], None],
    ):
        self.instance = instance
        self.stream = stream
        self.state: State = "lost"
        self.profile: Profile | None = None
        self._upstream = upstream
        self._turns = turns
        self._on_change = on_change
        self._profile_due_seconds = 0.0

    async def run(self) -> None:
        """Follow for ever."""
        pause_seconds = FIRST_PAUSE_SECONDS
        while True:
            try:
                await self._follow()
                pause_seconds = FIRST_PAUSE_SECONDS
            except NoStreamError as error:
                pause_seconds = SILENT_PAUSE_SECONDS
                self._becomes("silent", str(error))
            except (PrfaasError, TimeoutError) as error:
                if self.state == "followed":
                    pause_seconds = FIRST_PAUSE_SECONDS
                self._becomes("lost", str(error))
            except Exception:  # a bug met by what one instance sent must not end the gateway
                log.exception("events of instance %s met a bug", self.instance.name)
                self._becomes("lost", "a bug")
            await asyncio.sleep(pause_seconds * random.uniform(0.5, 1))  # noqa: S311 - it spreads, and hides nothing
            pause_seconds = min(LONGEST_PAUSE_SECONDS, 2 * pause_seconds)

    async def _follow(self) -> None:
        """Follow one connection to its end."""
        async with aclosing(self.stream.portions()) as stream:
            async for portions in stream:
                await self._turns.take(portions)
                await self._read_profile()
                self._becomes("followed", "")

    async def _read_profile(self) -> None:
        """Read the instance's profile once in a while; without one, prefixes are not fetched for it."""
        now_seconds = time.monotonic()
        if now_seconds < self._profile_due_seconds or self.instance.engine != "prfaas":
            return
        self._profile_due_seconds = now_seconds + PROFILE_SECONDS
        try:
            async with asyncio.timeout(2), self._upstream.reading(self.instance, PROFILE_PATH) as answer:
                size = min(answer.content_length or 0, PROFILE_BYTES)
                told = read_profile(await answer.content.readexactly(size), self.instance.url).profile
            self.profile = told if told.samples else None  # one that stands on no measurement would promise anything
        except (PrfaasError, TimeoutError) as error:
            log.debug("instance %s told no profile: %s", self.instance.name, error)

    def _becomes(self, state: State, why: str) -> None:
        if state != self.state:
            log.info("instance %s: its cache is %s%s", self.instance.name, state, f": {why}" if why else "")
        self.state = state
        self._on_change(self)
