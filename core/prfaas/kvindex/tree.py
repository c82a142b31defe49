"""The cached blocks of one instance by its events: a tree of blocks with attention rows, states, or both.

    usable match of a prompt = the longest n with attention rows in blocks 1 to n, and a state after block n

Attention and states are different bits of a block. Each may be in up to four mediums; one is enough. If an instance
never reported anything of states, its model has none, and only attention counts.

A prompt's blocks may be evicted in the middle, so a cached block proves little about those before it. Therefore an
empty block stays in the tree as long as it has children. So the tree is closed under prefixes, and bisection finds the
last block of a chain that the tree has. The path to that block has empty blocks and states. It is not walked.
Consecutive blocks of a chain have consecutive numbers, a *run*, and their bits lie in byte arrays that C searches.

A block takes 24 bytes beside its place in the table of keys. A tree has a bound: it refuses further blocks and their
descendants until others are removed.
"""

from array import array
from collections.abc import Iterable, Sequence
from typing import Final

from prfaas.kvindex.keys import NONE, Keys

ROOT: Final = NONE
"""The parent of first blocks: always known, and empty."""
MEDIUMS: Final = 4
_ATTENTION: Final = 0b0000_1111
"""Bits of a block's places: four mediums of attention rows, then four of states."""


class BlockTree:
    def __init__(self, max_blocks: int):
        self.max_blocks = max_blocks
        self.refused_blocks = 0
        """Blocks left out: beyond the bound, or with an unknown parent."""
        self._has_states = False
        self.clear()

    def __len__(self) -> int:
        return len(self._keys)

    def clear(self) -> None:
        """Forget all blocks, but not whether the model has states."""
        self._keys = Keys()
        self._without_rows = 0  # blocks without attention rows
        # By number, of which 0 is the root and 1 is never given. Freed numbers have depth 0 and begin a run.
        self._parents = array("I", [ROOT, ROOT])
        self._depths = array("I", [0, 0])
        self._children = array("I", [0, 0])
        self._places = bytearray(2)
        self._rows = bytearray(b"\1\1")  # 1: attention rows in some medium
        self._states = bytearray(2)  # 1: a state in some medium
        self._heads = bytearray(b"\1\1")  # 1: begins a run, so the block before it does not have the number before

    def note_states(self) -> None:
        """Record that the model has states, even if none is kept: then attention alone is no match."""
        self._has_states = True

    def find(self, key: int) -> int:
        """Return the number of a block, NONE if it is not here."""
        return self._keys.find(key)

    def depth(self, number: int) -> int:
        return self._depths[number]

    def store(self, keys: Sequence[int], parent: int | None, is_state: bool, medium: int) -> None:
        """Add blocks of one chain behind the block with key `parent`, None for the beginning.

        `medium` is below MEDIUMS. Blocks whose parent is not here count only if they are known already.
        """
        behind = ROOT if parent is None else self._keys.find(parent)
        parent_unknown = parent is not None and behind == NONE
        if parent_unknown or len(self) + len(keys) > self.max_blocks:
            self._fill(self._few(keys, behind, parent_unknown), is_state, medium)
            return
        numbers = self._keys.numbers(keys)
        if numbers and numbers[-1] - len(self._depths) == len(numbers) - 1:  # all are new, with new numbers
            self._append(len(numbers), behind, is_state, medium)
            return
        self._place(numbers, behind)
        self._fill(numbers, is_state, medium)

    def remove(self, keys: Iterable[int], is_state: bool, medium: int) -> None:
        """Remove blocks from a medium; unknown blocks are ignored."""
        bit = _bit(is_state, medium)
        find, places = self._keys.find, self._places
        for key in keys:
            number = find(key)
            if number == NONE or not places[number] & bit:
                continue
            left = places[number] = places[number] & ~bit
            if not left & ~_ATTENTION:
                self._states[number] = 0
            if self._rows[number] and not left & _ATTENTION:
                self._rows[number] = 0
                self._without_rows += 1
            if not left:
                self._prune(number)

    def usable(self, number: int, ahead: int = 0) -> int:
        """Return the usable match, in blocks, of a prompt whose chain leads to this block.

        A state up to `ahead` blocks after it counts if the tree continues without a branch.
        """
        last = self._connected(number) if self._without_rows else number
        if last == ROOT or not self._has_states:
            return self._depths[last]
        if ahead and last == number:
            last = self._state_ahead(number, ahead) or last
        states, heads, parents = self._states, self._heads, self._parents
        while last != ROOT:
            begin = heads.rfind(1, 0, last + 1)
            found = states.rfind(1, begin, last + 1)
            if found >= 0:
                return self._depths[found]
            last = parents[begin]
        return 0

    def _connected(self, number: int) -> int:
        """Return the last block on the path to this one up to which all blocks have attention rows."""
        at = last = number
        while at != ROOT:
            begin = self._heads.rfind(1, 0, at + 1)
            gap = self._rows.find(0, begin, at + 1)
            at = self._parents[begin]
            if gap >= 0:
                last = self._parents[gap]
        return last

    def _state_ahead(self, number: int, ahead: int) -> int:
        """Return the last block with a state among the next `ahead` blocks, all with rows; NONE if none."""
        end = number + 1 + ahead
        branch = self._heads.find(1, number + 1, end)
        end = branch if branch >= 0 else end
        gap = self._rows.find(0, number + 1, end)
        end = gap if gap >= 0 else end
        return max(self._states.rfind(1, number + 1, end), NONE)

    def _append(self, count: int, behind: int, is_state: bool, medium: int) -> None:
        """Add a chain of blocks with the next numbers."""
        first, depth = len(self._depths), self._depths[behind]
        self._parents.append(behind)
        self._parents.extend(range(first, first + count - 1))
        self._depths.extend(range(depth + 1, depth + count + 1))
        self._children[behind] += 1
        self._children.extend([1] * (count - 1))
        self._children.append(0)
        self._places.extend(bytes([_bit(is_state, medium)]) * count)
        self._rows.extend(bytes([not is_state]) * count)
        self._states.extend(bytes([is_state]) * count)
        self._heads.append(behind != first - 1)
        self._heads.extend(bytes(count - 1))
        if is_state:
            self._has_states = True
            self._without_rows += count

    def _place(self, numbers: Iterable[int], behind: int) -> None:
        """Add those blocks of a chain that are not here."""
        depths, known = self._depths, len(self._depths)
        depth = depths[behind]
        for number in numbers:
            depth += 1
            if number == known:
                known += 1
                self._parents.append(behind)
                depths.append(depth)
                self._children.append(0)
                self._places.append(0)
                self._rows.append(0)
                self._states.append(0)
                self._heads.append(behind != number - 1)
                self._children[behind] += 1
                self._without_rows += 1
            elif not depths[number]:  # freed before, or removed
                self._parents[number], depths[number] = behind, depth
                self._heads[number] = behind != number - 1
                self._children[behind] += 1
                self._without_rows += 1
                self._rows[number] = 0
            else:
                depth = depths[number]  # where it was first reported
            behind = number

    def _few(self, keys: Sequence[int], behind: int, parent_unknown: bool) -> list[int]:
        """Return the numbers of those blocks that are here or find room, and whose parents are here."""
        numbers: list[int] = []
        for key in keys:
            number = self._keys.find(key)
            if number == NONE:
                if parent_unknown or len(self) >= self.max_blocks:
                    self.refused_blocks += 1
                    parent_unknown = True
                    continue
                (number,) = self._keys.numbers([key])
                self._place([number], behind)
            numbers.append(number)
            behind, parent_unknown = number, False
        return numbers

    def _fill(self, numbers: Iterable[int], is_state: bool, medium: int) -> None:
        places, bit = self._places, _bit(is_state, medium)
        if is_state:
            self._has_states = True
            for number in numbers:
                places[number] |= bit
                self._states[number] = 1
            return
        rows = self._rows
        for number in numbers:
            places[number] |= bit
            if not rows[number]:
                rows[number] = 1
                self._without_rows -= 1

    def _prune(self, number: int) -> None:
        """Remove an empty block without children, and its empty ancestors."""
        while number != ROOT and not self._places[number] and not self._children[number]:
            parent = self._parents[number]
            self._keys.remove(number)
            self._depths[number] = 0
            # Freed: the run before it ends here, and no search takes it for a gap.
            self._rows[number] = self._heads[number] = 1
            self._without_rows -= 1
            self._children[parent] -= 1
            number = parent


def _bit(is_state: bool, medium: int) -> int:
    return 1 << (medium + MEDIUMS if is_state else medium)
