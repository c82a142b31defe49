"""The memory of an instance's devices. A stub until the memory check is merged, which replaces this file."""

from typing import Final

import msgspec

DEVICE_BYTES: Final[dict[str, float]] = {"h100": 80e9, "h200": 141e9}
USABLE: Final = 0.9


class InstanceMemory(msgspec.Struct, frozen=True, kw_only=True):
    """The devices of an instance, and the weights that they hold."""

    device: str
    devices: int
    weights_bytes: float

    @property
    def total_bytes(self) -> float:
        return self.devices * DEVICE_BYTES[self.device]
