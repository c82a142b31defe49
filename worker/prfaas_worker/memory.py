"""The host memory that a worker may still take, the check that weights fit into it before any of them is read, and
memory that other processes map.

In a container the limit of its control group counts, beyond which the kernel kills the process. Files that the kernel
caches for it and has not used of late can give way, so they count as available.
"""

import mmap
import os
import weakref
from pathlib import Path
from typing import Final

from prfaas.errors import ConfigError
from prfaas.memory import CGROUP, container_limit_bytes

_UNKNOWN_BYTES: Final = 1 << 62


def available_bytes() -> int:
    """Return how much memory there is; where the system does not say, more than anybody has."""
    return min(_machine_bytes(), _container_bytes())


def check_weights_fit(weight_bytes: int) -> None:
    """Raise ConfigError if weights of this size do not fit into the available memory."""
    if weight_bytes > (available := available_bytes()):
        raise ConfigError(
            f"the weights take {weight_bytes / 1e9:.2g} GB, and {available / 1e9:.2g} GB of memory are available: give "
            "a higher memory limit, a larger machine, or a smaller model"
        )


def share_memory(owner: object, nbytes: int) -> tuple[int, mmap.mmap]:
    """Return the descriptor of new memory that other processes may map, and our map of it. It is closed when its owner
    is collected. What nobody has written takes no memory."""
    descriptor = os.memfd_create("prfaas-cache")
    weakref.finalize(owner, os.close, descriptor)
    os.ftruncate(descriptor, nbytes)
    return descriptor, mmap.mmap(descriptor, nbytes)


def _machine_bytes() -> int:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return _UNKNOWN_BYTES
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), _UNKNOWN_BYTES)


def _container_bytes() -> int:
    """Return the rest of the container's limit."""
    try:
        limit_bytes = container_limit_bytes()
        if limit_bytes is None:
            return _UNKNOWN_BYTES
        used_bytes = int((CGROUP / "memory.current").read_text())
        stat = dict(line.split() for line in (CGROUP / "memory.stat").read_text().splitlines())
        return limit_bytes - used_bytes + int(stat.get("inactive_file", 0))
    except (OSError, ValueError):
        return _UNKNOWN_BYTES
