"""The seam between a transfer and an engine's memory: all that this package knows of a cache.

An engine implements `DestinationCache` for the caches that it receives, and makes frames whose payload it loads itself.
So neither the shape of its memory nor the library behind it is known here.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol

from prfaas.wire.frames import Address
from prfaas.wire.receive_ledger import LayerRows, LayerState
from prfaas.wire.transfer import LayerGroup, Manifest


class DestinationCache(Protocol):
    """The cache of one sequence at the destination. The threads of connections call it, one a part."""

    def held_bytes(self, count_bytes: int, /) -> int:
        """Return the memory that a part of so many bytes takes outside the cache, until it landed."""
        ...

    def room_for(
        self, manifest: Manifest, part: LayerRows | LayerState
    ) -> AbstractContextManager[Sequence[memoryview]]:
        """Give memory to receive rows or a state into, for a block; in manifest order, in any number of pieces."""
        ...

    def land(self, manifest: Manifest, part: LayerRows | LayerState, received: Sequence[memoryview], /) -> None:
        """Move the contents of `room_for` into the cache, unless that is the cache's memory."""
        ...


class CacheLayout(NamedTuple):
    """The shape of a model's caches: all that two instances must agree on."""

    fingerprint: str
    groups: tuple[LayerGroup, ...]
    hidden_size: int
    rank: int = 0
    ranks: int = 1

    def manifest(
        self, address: Address, start_token: int, end_token: int, *, is_prefix: bool, prompt: str = ""
    ) -> Manifest:
        return Manifest(
            fingerprint=self.fingerprint,
            transfer_id=address.transfer_id,
            epoch=address.epoch,
            start_token=start_token,
            end_token=end_token,
            groups=self.groups,
            hidden_size=0 if is_prefix else self.hidden_size,
            rank=self.rank,
            ranks=self.ranks,
            prompt=prompt,
        )
