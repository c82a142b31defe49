"""The memory limits of containers, and how much of its own a process lets strangers fill.

This is the one place for all of them. A container has the limit here, unless the chart's values, its policy or its pool
name another one, and its process divides the limit that it finds itself under. So whoever changes the limit changes the
budgets.
"""

import math
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

from prfaas.errors import ConfigError
from prfaas.util import MIB

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
WORKER_LIMIT_GIB: Final = 32
"""Of our worker's container, for each GPU. Weights and cache take most of a lower one."""
MAX_BODY_BYTES: Final = 32 << 20
"""Of one body that a worker reads. There is room for one under any limit, else it could never be read."""
MAX_BODIES_BYTES: Final = 256 << 20
"""Of all bodies that arrive at a worker or wait for a thread."""
WORKER_BODIES_PART: Final = 32
"""A thirty-second for them: each is there four times at the worst, as pieces, whole, parsed, and as tokens."""
WORKER_HEADS_PART: Final = 8
"""With 1 GiB one caller still has 512 connections, more than requests may wait."""
LEAST_PART: Final = 1 / 8
"""Of the usual bounds on answers: 25,000 values of a member's, and a page of 50 pods has some 15,000."""


class GatewayBudgets(NamedTuple):
    """What a gateway may hold of bodies, of heads and of its prefix index."""

    bodies_bytes: int
    heads_bytes: int
    index_blocks: int


class WorkerBudgets(NamedTuple):
    """What a worker may hold of bodies that arrive or wait for a thread, and of heads."""

    bodies_bytes: int
    heads_bytes: int


class UsualMemory(NamedTuple):
    """The usual limit of a process's container, and what the process takes of it at rest."""

    process: str
    limit_mib: int
    rest_mib: int


OPERATOR: Final = UsualMemory("operator", limit_mib=512, rest_mib=160)
"""The chart's limit. With 100 pools it takes 135 MiB, with 1,000 pools 214."""
SCHEDULER: Final = UsualMemory("scheduler", limit_mib=256, rest_mib=64)


def gateway_budgets(limit_bytes: int | None) -> GatewayBudgets:
    """Return what a gateway may hold under a limit; None: the one that its container usually has."""
    limit_bytes = limit_bytes or GATEWAY_LIMIT_GIB << 30
    blocks = min(MAX_INDEX_BLOCKS, limit_bytes // INDEX_PART // INDEX_ENTRY_BYTES)
    return GatewayBudgets(limit_bytes // BODIES_PART, limit_bytes // HEADS_PART, blocks)


def worker_budgets(limit_bytes: int | None) -> WorkerBudgets:
    """Return what a worker may hold under a limit; None: the one that its container usually has."""
    limit_bytes = limit_bytes or WORKER_LIMIT_GIB << 30
    bodies_bytes = max(MAX_BODY_BYTES, min(MAX_BODIES_BYTES, limit_bytes // WORKER_BODIES_PART))
    return WorkerBudgets(bodies_bytes, limit_bytes // WORKER_HEADS_PART)


def bounds_part(usual: UsualMemory, limit_bytes: int | None) -> float:
    """Return the part of its bounds on the answers of others' servers that a process may use under a limit: what that
    leaves beside the process at rest, of what the usual one leaves. 1 under no limit or a higher one.

    Raises ConfigError for a limit that leaves too little to work with.
    """
    if limit_bytes is None:
        return 1.0
    free_mib = usual.limit_mib - usual.rest_mib
    part = min(1.0, (limit_bytes / MIB - usual.rest_mib) / free_mib)
    if part < LEAST_PART:
        least_mib = math.ceil(usual.rest_mib + LEAST_PART * free_mib)
        raise ConfigError(
            f"the container's memory limit of {limit_bytes // MIB} MiB is too low for the {usual.process}: give it "
            f"{least_mib} MiB or more"
        )
    return part


def container_limit_bytes(cgroup: Path = CGROUP) -> int | None:
    """Return the limit of the container that this process is in; None without one."""
    for name in LIMIT_FILES:
        with suppress(OSError, ValueError):  # the latter for `max`
            limit_bytes = int((cgroup / name).read_text())
            return limit_bytes if limit_bytes < NO_LIMIT_BYTES else None
    return None
