"""The memory limits of containers, and the budgets of a gateway that are parts of its own.

This is the one place for all of them. The operator gives a gateway's container the limit here, unless its policy names
another one, and the gateway divides the limit that it finds itself under. So whoever changes the limit changes the
budgets.
"""

from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

CGROUP: Final = Path("/sys/fs/cgroup")
LIMIT_FILES: Final = ("memory.max", "memory/memory.limit_in_bytes")
"""Of version 2 of the kernel's control groups, and of version 1."""
NO_LIMIT_BYTES: Final = 1 << 60
"""So much is no limit: version 1 says about 2**63 where there is none."""
GATEWAY_LIMIT_GIB: Final = 4
"""Of a gateway's container. A busy gateway takes 80 MiB besides its budgets."""
BODIES_PART: Final = 16
"""A sixteenth for the bodies of requests under way: each is there twice for a moment, and takes more when parsed."""
ARRIVING_PART: Final = 4
"""A quarter of that for those that still arrive, since who holds them back may be a stranger."""
INDEX_PART: Final = 5
"""Likewise for the prefix index."""
HEADS_PART: Final = 4
"""Likewise for the heads of requests that strangers send on all connections."""
INDEX_ENTRY_BYTES: Final = 80
"""Of a token block of the prefix index and the byte block that is mapped to it."""
MAX_INDEX_BLOCKS: Final = 10_000_000
"""400 MB: 24 bytes a block in its tree, and about 16 in the table of keys."""


class GatewayBudgets(NamedTuple):
    """What a gateway may hold of bodies, of heads and of its prefix index."""

    bodies_bytes: int
    heads_bytes: int
    index_blocks: int


def gateway_budgets(limit_bytes: int | None) -> GatewayBudgets:
    """Return what a gateway may hold under a limit; None: the one that its container usually has."""
    limit_bytes = limit_bytes or GATEWAY_LIMIT_GIB << 30
    blocks = min(MAX_INDEX_BLOCKS, limit_bytes // INDEX_PART // INDEX_ENTRY_BYTES)
    return GatewayBudgets(limit_bytes // BODIES_PART, limit_bytes // HEADS_PART, blocks)


def container_limit_bytes(cgroup: Path = CGROUP) -> int | None:
    """Return the limit of the container that this process is in; None without one."""
    for name in LIMIT_FILES:
        with suppress(OSError, ValueError):  # the latter for `max`
            limit_bytes = int((cgroup / name).read_text())
            return limit_bytes if limit_bytes < NO_LIMIT_BYTES else None
    return None
