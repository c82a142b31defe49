"""What an instance's devices hold: weights, and beside them the caches of what it serves at once.

One rule for all: beside the weights fit the longest request and a batch of the mean one, each with its whole answer. An
instance that only prefills has a batch of one and no answers. What does not fit is refused with both figures and what
would fit, since a plan of it would only look like one.

Answers count whole, because what decodes at some moment is more often a long answer than a short one: if lengths are
spread exponentially, it is as far as the mean answer is long. Ranks of tensor parallelism that find no head of their
own in the rows of an attention layer hold a copy: all of them of an MLA latent. What passes may still be too large for
an engine: activations, and what other requests left in a prefix cache, do not count.
"""

from typing import Final

import msgspec

from prfaas.errors import ConfigError
from prfaas.wire.profile import Profile

DEVICE_BYTES: Final[dict[str, float]] = {
    "a100": 80e9,
    "b200": 180e9,
    "b300": 288e9,
    "gb200": 186e9,
    "gb300": 279e9,
    "h100": 80e9,
    "h20": 96e9,
    "h20-141": 141e9,
    "h200": 141e9,
    "l40s": 48e9,
}
"""Memory of one device, by its vendor's data sheet. H20 is sold with two sizes."""
USABLE: Final = 0.9
"""The share that vLLM takes by default (--gpu-memory-utilization), and others nearly."""
_NODE_DEVICES: Final = {"gb200": 4, "gb300": 4}
_USUAL_NODE: Final = 8
"""Devices of a node that _NODE_DEVICES does not name. Of another device an instance gets no more than this."""
_MOST_DEVICES: Final = 64
"""What does not fit into so many is more likely another unit."""
_SHOWN: Final = 3
"""Other devices that a message names."""


class InstanceMemory(msgspec.Struct, frozen=True, kw_only=True):
    """The devices of an instance, and the weights that they hold together."""

    device: str
    devices: int
    weights_bytes: float
    row_copies: int = 1
    """Times that the instance holds each row, over its ranks."""

    @property
    def total_bytes(self) -> float:
        return self.devices * DEVICE_BYTES[self.device]

    @property
    def left_bytes(self) -> float:
        """For caches, beside the weights; below 0 where not even these fit."""
        return USABLE * self.total_bytes - self.weights_bytes

    def cache_bytes(self, profile: Profile, tokens: int) -> int:
        """Return the bytes that a cache of so many tokens takes here."""
        return profile.state_bytes + self.row_copies * profile.token_bytes * tokens


def check_memory(where: str, memory: InstanceMemory, what: str, cache_bytes: float = 0.0, cure: str = "") -> None:
    """Raise ConfigError where the weights and so many bytes of caches do not fit. `what` names what has to.

    Without a `cure` the message says which devices would do.
    """
    if cache_bytes <= memory.left_bytes:
        return
    needed = memory.weights_bytes + cache_bytes
    parts = f" ({_gb(memory.weights_bytes)} and {_gb(cache_bytes)})" if cache_bytes else ""
    raise ConfigError(
        f"{where}: {what} take {_gb(needed)}{parts}, and {memory.devices} x {memory.device} hold "
        f"{_gb(memory.total_bytes)}, of which engines use {USABLE:.0%} ({_gb(USABLE * memory.total_bytes)}); "
        f"{cure or _what_fits(memory, needed)}"
    )


def _what_fits(memory: InstanceMemory, needed_bytes: float) -> str:
    """Name the fewest devices that hold so much: of the same kind by doubling, and of others within a node's eight."""
    same = memory.devices
    while same <= _MOST_DEVICES and not _holds(memory.device, same, needed_bytes):
        same *= 2
    found = [(same, memory.device)] if same <= _MOST_DEVICES else []
    others = (
        (count, device)
        for device in DEVICE_BYTES
        if device != memory.device
        and (count := next((n for n in (1, 2, 4, _USUAL_NODE) if _holds(device, n, needed_bytes)), 0))
    )
    found += sorted(others)[:_SHOWN]
    if not found:
        return f"not even {_MOST_DEVICES} devices do: give weightsGb in GB"
    return f"it fits in {' or '.join(_named(*one) for one in found)}"


def _holds(device: str, count: int, needed_bytes: float) -> bool:
    return USABLE * count * DEVICE_BYTES[device] >= needed_bytes


def _named(count: int, device: str) -> str:
    nodes = -(-count // _NODE_DEVICES.get(device, _USUAL_NODE))
    return f"{count} x {device}" + (f" ({nodes} nodes an instance)" if nodes > 1 else "")


def _gb(count: float) -> str:
    return f"{count / 1e9:,.0f} GB" if count >= 1e10 else f"{count / 1e9:.1f} GB"
