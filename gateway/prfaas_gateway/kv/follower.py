"""Follows the event stream of one instance for as long as it is in the routing table.

    GET /v1/kv-events      frames: 4 bytes of length, big-endian, then msgpack [topic, seq, payload]

A connection that ends, falls silent or says nonsense is made again, after a pause that grows up to half a minute. An
instance that has no such stream is asked again each minute. Taking in events never occupies the gateway for long: all
followers take turns, and rest three times as long as they worked.
"""

import asyncio
import logging
import random
import struct
import time
from collections.abc import Callable, Iterator
from typing import Final, Literal

import msgspec

from prfaas.errors import PrfaasError, ProtocolError, UnreachableError
from prfaas.wire.profile import PATH as PROFILE_PATH
from prfaas.wire.profile import Profile, read_profile
from prfaas.wire.routes import Instance
from prfaas_gateway.kv.reading import Reading
from prfaas_gateway.upstream import Upstream

log = logging.getLogger(__name__)

CONTENT_TYPE: Final = "application/x-prfaas-events"
LARGEST_FRAME_BYTES: Final = 8 << 20
"""The events of one step: those of a prompt of a million tokens fit."""
SILENCE_SECONDS: Final = 20.0
"""A stream says something every five."""
FIRST_PAUSE_SECONDS: Final = 0.25
LONGEST_PAUSE_SECONDS: Final = 30.0
SILENT_PAUSE_SECONDS: Final = 60.0
PROFILE_SECONDS: Final = 60.0
PROFILE_BYTES: Final = 64 << 10
TURN_SECONDS: Final = 0.002
REST_FACTOR: Final = 3
_LENGTH: Final = struct.Struct("!I")
_FRAME: Final = msgspec.msgpack.Decoder(tuple[str, int, bytes])

State = Literal["followed", "silent", "lost"]


class NoStreamError(ProtocolError):
    """This instance tells nothing of its cache, or not in our way."""


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
        reading: takes its frames in.
        upstream: reaches it.
        turns: those of all followers.
        on_change: called whenever `state` changes or frames were taken in.

    """

    def __init__(
        self,
        instance: Instance,
        reading: Reading,
        upstream: Upstream,
        turns: Turns,
        on_change: Callable[["Follower"], None],
    ):
        self.instance = instance
        self.reading = reading
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
        async with self._upstream.reading(self.instance, self.reading.path) as answer:
            if answer.status != 200 or answer.content_type != CONTENT_TYPE:
                if answer.status >= 500:
                    raise UnreachableError(f"{self.instance.url} answers HTTP {answer.status}")
                raise NoStreamError(f"{self.instance.url} has no event stream (HTTP {answer.status})")
            while True:
                async with asyncio.timeout(SILENCE_SECONDS):
                    (size,) = _LENGTH.unpack(await answer.content.readexactly(_LENGTH.size))
                    if size > LARGEST_FRAME_BYTES:
                        raise ProtocolError(f"a frame of {size} bytes; {LARGEST_FRAME_BYTES} are the most")
                    topic, seq, payload = _frame(await answer.content.readexactly(size))
                if topic == "prfaas.end":
                    return
                await self._turns.take(self.reading.take(topic, seq, payload))
                await self._read_profile()
                self._becomes("followed", "")

    async def _read_profile(self) -> None:
        """Read the instance's profile once in a while; without one, prefixes are not fetched for it."""
        now_seconds = time.monotonic()
        if now_seconds < self._profile_due_seconds:
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


def _frame(body: bytes) -> tuple[str, int, bytes]:
    try:
        return _FRAME.decode(body)
    except msgspec.DecodeError as error:
        raise ProtocolError(f"a frame of the event stream cannot be read: {error}") from error
