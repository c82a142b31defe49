"""What an instance's devices hold: weights, and beside them the caches of what it serves at once.

An instance that prefills holds one prompt, the longest. One that decodes holds `maxBatch` requests of mean length, each
in the middle of its answer. Engines take nine tenths of a device's memory by default. What does not fit is refused with
both figures and what would fit, since a plan of it would only look like one.
"""

from typing import Final

import msgspec

from prfaas.errors import ConfigError

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
_ONE_NODE: Final = 8
"""Devices of a node at most."""


class InstanceMemory(msgspec.Struct, frozen=True, kw_only=True):
    """The devices of an instance, and the weights that they hold together."""

    device: str
    devices: int
    weights_bytes: float

    @property
    def total_bytes(self) -> float:
        return self.devices * DEVICE_BYTES[self.device]

    @property
    def left_bytes(self) -> float:
        """For caches, beside the weights; below 0 where not even these fit."""
        return USABLE * self.total_bytes - self.weights_bytes


def check_weights(where: str, memory: InstanceMemory) -> None:
    """Raise ConfigError where the weights alone do not fit."""
    if memory.left_bytes > 0:
        return
    raise ConfigError(
        f"{where}: weights of {_gb(memory.weights_bytes)} do not fit {memory.devices} x {memory.device}, "
        f"{_gb(memory.total_bytes)} of which engines use {USABLE:.0%}; {_would_fit(memory)}"
    )


def check_prompt(where: str, memory: InstanceMemory, tokens: int, cache_bytes: float) -> None:
    """Raise ConfigError where the cache of the longest prompt does not fit beside the weights."""
    if cache_bytes > memory.left_bytes:
        raise ConfigError(
            f"{where}: the cache of a prompt of {tokens} tokens takes {_gb(cache_bytes)}, and beside the weights "
            f"{memory.devices} x {memory.device} have {_gb(memory.left_bytes)}; give more gpus, or shorter prompts"
        )


def check_batch(where: str, memory: InstanceMemory, max_batch: int, cache_bytes: float) -> None:
    """Raise ConfigError where `max_batch` caches of this size do not fit beside the weights."""
    fitting = int(memory.left_bytes // cache_bytes)
    if fitting < max_batch:
        cure = f"give at most {fitting}" if fitting else "give more gpus"
        raise ConfigError(
            f"{where}.maxBatch is {max_batch}: so many caches of the mean request take {_gb(max_batch * cache_bytes)}, "
            f"and beside the weights {memory.devices} x {memory.device} have {_gb(memory.left_bytes)}; {cure}"
        )


def _would_fit(memory: InstanceMemory) -> str:
    """Name the devices that hold the weights: more of these, or as many of others as a node has at most."""
    found: list[str] = []
    more = memory.devices
    while USABLE * more * DEVICE_BYTES[memory.device] <= memory.weights_bytes:
        more *= 2
    nodes = -(-more // _ONE_NODE)
    found.append(f"{more} x {memory.device}" + (f" ({nodes} nodes an instance)" if nodes > 1 else ""))
    for device, size in DEVICE_BYTES.items():
        if device != memory.device and USABLE * _ONE_NODE * size > memory.weights_bytes:
            found.append(f"{_ONE_NODE} x {device}")
    return "what would fit: " + ", ".join(found)


def _gb(count: float) -> str:
    return f"{count / 1e9:,.0f} GB" if count >= 1e10 else f"{count / 1e9:.1f} GB"
