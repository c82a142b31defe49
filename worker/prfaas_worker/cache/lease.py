"""What one sequence holds of the cache, and a state that the cache keeps."""

from dataclasses import dataclass, field
from typing import Any, TypeAlias

Key: TypeAlias = Any
"""Hashes of blocks here; anything that can be hashed would do."""


@dataclass(slots=True, eq=False)
class Checkpoint:
    """A state in the pool. `uses` counts the sequences that started from it, and the first sight of its branch."""

    key: Key
    pages: tuple[int, ...]
    uses: int = 0


@dataclass(slots=True, eq=False)
class Lease:
    """One sequence's memory: a state slot, and pages in order of its tokens. All else is the cache's own business."""

    slot: int
    pages: list[int]
    branch_blocks: int = 0
    published: int = 0
    started_from: Checkpoint | None = None
    rolling: Checkpoint | None = None
    touched: list[Checkpoint] = field(default_factory=list)
    epoch: int = 0
