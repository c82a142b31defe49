"""What an engine remembers of the caches that its mover carries: one table of sources, one of fetches, by transfer.

A cache crosses whole, or in slices for several ranks. Each of these is a message to the mover, with a key and an end of
its own. The memory of a cache stays its request's until all of them have ended, and no copy runs any more. Copies run
on the threads of the mover's client, and whoever takes the memory away before waits for them.

Nothing here knows what a cache is: an engine keeps in `cache` what its copies need.
"""

import threading
from collections.abc import Iterable, Iterator, Set
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

from prfaas.errors import PeerError
from prfaas_transfer.mover.messages import transfer_of

T = TypeVar("T")


@dataclass
class _Entry(Generic[T]):
    """The cache of one request; `open` are the keys of what the mover has of it. `copies` run now."""

    request_id: str
    cache: T
    open: set[str]
    copies: int = 0

    @property
    def has_memory(self) -> bool:
        return True

    @property
    def is_free(self) -> bool:
        return not self.open and not self.copies


@dataclass
class Source(_Entry[T]):
    """A request whose cache is offered. It `is_revoked` if its memory was taken away, `is_over` if it has ended."""

    is_revoked: bool = False
    is_over: bool = False

    @property
    def has_memory(self) -> bool:
        return not self.is_revoked


@dataclass
class Fetch(_Entry[T]):
    """A request whose cache comes; `reason` says why it will not be whole, and `is_told` that somebody heard so."""

    reason: str = ""
    is_told: bool = False


E = TypeVar("E", bound=_Entry[Any])


class _Table(Generic[E]):
    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._entries: dict[str, E] = {}  # By transfer.

    def __len__(self) -> int:
        return len(self._entries)

    @contextmanager
    def _copying(self, key: str) -> Iterator[E]:
        """Have a request keep its memory for a block that copies a part. Raises PeerError if it has none any more."""
        with self._changed:
            entry = self._entries.get(transfer_of(key))
            if entry is None or key not in entry.open:
                raise PeerError("the transfer is over")
            if not entry.has_memory:
                raise PeerError("the request has lost its memory")
            entry.copies += 1
        try:
            yield entry
        finally:
            with self._changed:
                entry.copies -= 1
                self._changed.notify_all()

    def finish(self, key: str) -> E | None:
        """Take out a cache that crossed whole and has ended, of an engine that hears of ends at once; wait for a copy
        that runs. Return its entry, None if there is none."""
        with self._changed:
            entry = self._entries.get(transfer_of(key))
            if entry is None:
                return None
            entry.open.discard(key)  # `copying` looks at this under the same lock, so no copy begins any more
            self._changed.wait_for(lambda: not entry.copies)
            del self._entries[transfer_of(key)]
            return entry

    def __contains__(self, transfer_id: str) -> bool:
        return transfer_id in self._entries

    def _of(self, request_id: str) -> E | None:
        return next((entry for entry in self._entries.values() if entry.request_id == request_id), None)


class Sources(_Table[Source[T]], Generic[T]):
    """The caches that an engine offers."""

    def add(self, transfer_id: str, request_id: str, keys: Iterable[str], cache: T) -> None:
        """Note a cache, before the mover hears of it. A request without keys keeps nothing for anybody."""
        with self._changed:
            self._entries[transfer_id] = Source(request_id, cache, set(keys))

    def caches(self) -> list[T]:
        """Return every cache that is offered, or was and is still sent."""
        with self._changed:
            return [source.cache for source in self._entries.values()]

    def cache_of(self, request_id: str) -> T | None:
        """Return the cache of a request that gives one, and has its memory."""
        with self._changed:
            source = self._of(request_id)
            return source.cache if source is not None and source.has_memory else None

    @contextmanager
    def copying(self, key: str) -> Iterator[T]:
        """Give an offer's cache for a block that copies a part of it. Raises PeerError if nothing may be copied."""
        with self._copying(key) as source:
            yield source.cache

    def revoke(self, request_id: str) -> T | None:
        """Copy nothing of a request any more; wait for a copy that runs, and for none of another request. Return its
        cache, None if it has none to give."""
        with self._changed:
            source = self._of(request_id)
            if source is None or source.is_revoked:
                return None
            source.is_revoked = True  # `copying` looks at this under the same lock, so no copy begins any more
            self._changed.wait_for(lambda: not source.copies)
            return source.cache

    def end(self, key: str) -> None:
        """Note the end of an offer."""
        with self._changed:
            self._entries[transfer_of(key)].open.discard(key)

    def take_sent(self, over: Set[str] = frozenset()) -> set[str]:
        """Note requests that are over; return, once, those whose memory nothing reads any more."""
        if not self._entries:
            return set()
        with self._changed:
            for source in self._entries.values():
                source.is_over = source.is_over or source.request_id in over
            sent = {transfer: one for transfer, one in self._entries.items() if one.is_over and one.is_free}
            for transfer in sent:
                del self._entries[transfer]
        return {source.request_id for source in sent.values()}


class InVain(NamedTuple):
    """A request whose cache will not be whole, and the keys of fetches that still bring parts of it."""

    request_id: str
    keys: frozenset[str]


class FetchNews(NamedTuple):
    """Requests whose caches have come, or will not (these have come, too); and those of which it is new that a part did
    not come, while others may still be under way."""

    received: set[str]
    failed: set[str]
    newly_failed: set[str]


class Fetches(_Table[Fetch[T]], Generic[T]):
    """The caches that come to an engine."""

    def add(self, transfer_id: str, request_id: str, keys: Iterable[str], cache: T, reason: str = "") -> None:
        """Note a cache, before the mover hears of it. Without keys all of it is here, or will not come for a
        `reason`."""
        fetch = Fetch(request_id, cache, set(keys), reason=reason)
        with self._changed:
            self._entries[transfer_id] = fetch

    @contextmanager
    def copying(self, key: str) -> Iterator[T]:
        """Give a fetch's cache for a block that copies a part into it. Raises PeerError if it is over."""
        with self._copying(key) as fetch:
            yield fetch.cache

    def end(self, key: str, reason: str) -> InVain | None:
        """Note the end of a fetch, which a reason has failed. Return what is in vain now, at a request's first one."""
        with self._changed:
            fetch = self._entries[transfer_of(key)]
            fetch.open.discard(key)
            is_first = bool(reason) and not fetch.reason
            fetch.reason = fetch.reason or reason
            return InVain(fetch.request_id, frozenset(fetch.open)) if is_first else None

    def keys_of(self, request_ids: Set[str]) -> set[str]:
        """Return the keys of all fetches of these requests that have not ended."""
        if not self._entries:
            return set()
        with self._changed:
            return {key for one in self._entries.values() if one.request_id in request_ids for key in one.open}

    def take(self) -> FetchNews:
        """Return what is new since the last call."""
        if not self._entries:
            return FetchNews(set(), set(), set())
        with self._changed:
            told = [one for one in self._entries.values() if one.reason and not one.is_told]
            for one in told:
                one.is_told = True
            ended = [self._entries.pop(name) for name, one in list(self._entries.items()) if one.is_free]
        failed = {one.request_id for one in ended if one.reason}
        return FetchNews({one.request_id for one in ended}, failed, {one.request_id for one in told})
