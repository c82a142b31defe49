"""Mooncake Transfer Engine as a carrier: RDMA, or its own TCP, between machines that trust each other.

Its peers read registered memory by address, with no questions asked, so nothing but an arena of slots is registered:
payloads are copied into it on one side and out of it on the other. What is hard is a read that fails: bytes may still
land later, so the slot that it reads into is set aside for longer than the engine tries.
"""

import os
import queue
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np

from prfaas.errors import CapacityError, ConfigError, UnreachableError
from prfaas.wire.frames import Buffer
from prfaas_worker.transfer.carriers import Slot
from prfaas_worker.transfer.stop import Stop, StoppedError

SLOT_BYTES: Final = 4 << 20
QUARANTINE_SECONDS: Final = 60.0
COMING_SECONDS: Final = 2.0
"""Longer than this all slots are busy only when most of them are set aside."""
_TICK_SECONDS: Final = 0.2


class Mooncake:
    """A carrier over an engine of this process.

    Args:
        engine: a `mooncake.engine.TransferEngine` that is initialised.
        host: the address that peers reach it by.
        fabric: the name of the fabric.
        arena_bytes: memory to register; half of it is for payloads that leave, half for those that come.

    """

    def __init__(self, engine: Any, host: str, fabric: str, arena_bytes: int):
        self.fabric = fabric
        self.segment = f"{host}:{engine.get_rpc_port()}"
        self.slot_bytes = SLOT_BYTES
        self._engine = engine
        count = max(2, arena_bytes // SLOT_BYTES)
        self._arena = np.zeros((count, SLOT_BYTES), dtype=np.uint8)
        if engine.register_memory(self._arena.ctypes.data, self._arena.nbytes) != 0:
            raise ConfigError(f"Mooncake cannot register {self._arena.nbytes} bytes of memory: see its log above")
        # Apart, or two instances that send to each other could wait for each other's slots.
        self._leaving: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._coming: queue.SimpleQueue[int] = queue.SimpleQueue()
        for number in range(count):
            (self._leaving if number % 2 else self._coming).put(number)
        self._set_aside: list[tuple[float, int]] = []

    def lend(self, payload: Sequence[Buffer], stop: Stop, timeout_seconds: float) -> Slot:
        """Copy a payload into a slot; see Carrier."""
        number = self._slot(self._leaving, stop, timeout_seconds)
        at = 0
        for part in payload:
            self._arena[number, at : at + len(part)] = np.frombuffer(part, dtype=np.uint8)
            at += len(part)
        return Slot(self._address(number), number)

    def take_back(self, slot: Slot) -> None:
        """Use a slot anew: whoever still reads it finds the digest wrong."""
        self._leaving.put(slot.number)

    @contextmanager
    def fetched(self, segment: str, address: int, nbytes: int, stop: Stop) -> Iterator[memoryview]:
        """Read a payload into a slot; see Carrier."""
        number = self._slot(self._coming, stop, COMING_SECONDS)
        if self._engine.transfer_sync_read(segment, self._address(number), address, nbytes) != 0:
            self._set_aside.append((time.monotonic() + QUARANTINE_SECONDS, number))
            raise UnreachableError(f"Mooncake cannot read {nbytes} bytes of {segment}: see its log")
        try:
            yield self._arena[number, :nbytes].data
        finally:
            self._coming.put(number)

    def _address(self, number: int) -> int:
        return self._arena.ctypes.data + number * SLOT_BYTES

    def _slot(self, slots: "queue.SimpleQueue[int]", stop: Stop, timeout_seconds: float) -> int:
        deadline = time.monotonic() + timeout_seconds
        while not stop.is_set:
            self._release_set_aside()
            try:
                return slots.get(timeout=_TICK_SECONDS)
            except queue.Empty:
                if time.monotonic() > deadline:
                    raise CapacityError(f"no slot of Mooncake's memory came free in {timeout_seconds:g} s") from None
        raise StoppedError("the transfer was ended here")

    def _release_set_aside(self) -> None:
        now = time.monotonic()
        while self._set_aside and self._set_aside[0][0] < now:
            self._coming.put(self._set_aside.pop(0)[1])


def start(host: str, fabric: str, arena_bytes: int) -> Mooncake:
    """Start an engine of this process.

    Raises:
        ConfigError: the package is not installed, or cannot start here.

    """
    os.environ.setdefault("MC_TCP_PROGRESS_TIMEOUT_SEC", "2")  # without it late bytes land for minutes
    try:
        from mooncake.engine import TransferEngine  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ConfigError(
            f"--mooncake-fabric needs Mooncake Transfer Engine, which cannot be loaded ({error}): install "
            "mooncake-transfer-engine, or mooncake-transfer-engine-non-cuda where there is no CUDA, and libibverbs"
        ) from error
    engine = TransferEngine()
    if engine.initialize(host, "P2PHANDSHAKE", "rdma" if _has_rdma() else "tcp", "") != 0:
        raise ConfigError(f"Mooncake Transfer Engine does not start on {host}: see its log above")
    return Mooncake(engine, host, fabric, arena_bytes)


def _has_rdma() -> bool:
    devices = Path("/sys/class/infiniband")
    return devices.is_dir() and any(devices.iterdir())
