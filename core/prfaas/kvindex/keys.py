"""Numbers 64-bit keys in about 16 bytes a key, for tables of millions of blocks.

A dict of integers takes about 100 bytes an entry. Here an array holds each key at its number. A table of 32-bit
numbers, with open addressing and linear probing, leads to the number. The two take 8 and 6 to 12 bytes a key. The table
has 256 parts that grow separately, so that no caller waits while millions of entries move. Keys are numbered in
batches, because calls would cost as much as the work.

A key is Python's hash of a name's bytes, salted in each process. So a peer cannot choose names that crowd one place of
the table. Two names with one key are one to the table: among ten million honest names with a chance of one to 300,000.
Forged names only harm the table of the forger's own events.
"""

from array import array
from collections.abc import Sequence
from typing import Final

import numpy as np

NONE: Final = 0
"""The number of an unknown key; in the table, a free place."""
_GONE: Final = 1
"""In the table: a removed entry. As a number, its key is -1, which Python's hash never gives."""
_PARTS: Final = 256
_SMALLEST: Final = 8


def key_of(name: bytes | int) -> int:
    """Return the key of a name: bytes, or an integer of which 64 bits count."""
    return hash((name & 0xFFFF_FFFF_FFFF_FFFF).to_bytes(8, "little") if isinstance(name, int) else name)


def keys_of(names: Sequence[bytes | int]) -> list[int]:
    """Return the keys of many names."""
    if set(map(type, names)) <= {bytes}:
        return list(map(hash, names))
    return [key_of(name) for name in names]


class Keys:
    """A set of keys, numbered from 2 on. Numbers of removed keys are reused, the latest first."""

    def __init__(self) -> None:
        self._keys = array("q", [0, -1])
        self._parts = [array("I", bytes(4 * _SMALLEST)) for _ in range(_PARTS)]
        self._room = [_room(_SMALLEST)] * _PARTS  # places in each part that may be taken before it grows
        self._spare = array("I")

    def __len__(self) -> int:
        return len(self._keys) - 2 - len(self._spare)

    def find(self, key: int) -> int:
        """Return the number of a key, NONE if it is not here."""
        part, keys = self._parts[key & 255], self._keys
        mask = len(part) - 1
        at = key >> 8 & mask
        while number := part[at]:
            if keys[number] == key:
                return number
            at = at + 1 & mask
        return NONE

    def numbers(self, wanted: Sequence[int]) -> list[int]:
        """Return the numbers of keys; new keys get a number."""
        parts, keys, room, spare = self._parts, self._keys, self._room, self._spare
        found: list[int] = []
        for key in wanted:
            which = key & 255
            part = parts[which]
            mask = len(part) - 1
            at = key >> 8 & mask
            while number := part[at]:
                if keys[number] == key:
                    break
                at = at + 1 & mask
            else:
                if spare:
                    number = spare.pop()
                    keys[number] = key
                else:
                    number = len(keys)
                    keys.append(key)
                part[at] = number
                room[which] = left = room[which] - 1
                if not left:
                    self._make_room(which)
            found.append(number)
        return found

    def remove(self, number: int) -> None:
        key = self._keys[number]
        part = self._parts[key & 255]
        mask = len(part) - 1
        at = key >> 8 & mask
        while part[at] != number:
            at = at + 1 & mask
        part[at] = _GONE
        self._keys[number] = -1
        self._spare.append(number)

    def _make_room(self, which: int) -> None:
        """Move a part to a table of twice the size, or of the same size if half of its entries are removed ones."""
        old = np.frombuffer(self._parts[which], np.uint32)
        live = old[old > _GONE]
        # Two thirds are filled when this is called, so a third of the table is half of its entries.
        size = len(old) * (2 if 3 * len(live) > len(old) else 1)
        first_slots = np.frombuffer(self._keys, np.int64)[live] >> 8 & size - 1
        order, steps = np.argsort(first_slots), np.arange(len(live))
        live = live[order]
        # Each takes its first slot, or the place after the one before it, as if they had come in this order.
        places = np.maximum.accumulate(first_slots[order] - steps) + steps
        inside = int(np.searchsorted(places, size))
        table = np.zeros(size, np.uint32)
        table[places[:inside]] = live[:inside]
        beyond = live[inside:]  # these continue from the beginning
        table[np.flatnonzero(table == NONE)[: len(beyond)]] = beyond
        self._parts[which], self._room[which] = array("I", table.tobytes()), _room(size) - len(live)


def _room(size: int) -> int:
    """Return how many places of a part may be filled: two thirds, because searches get long beyond."""
    return 2 * (size - 1) // 3 + 1
