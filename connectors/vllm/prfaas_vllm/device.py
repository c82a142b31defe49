"""The device that computes: when its kernels are done, copies beside them, and host memory that it reaches by itself.

An accelerator's kernels run on when Python is through with a step, on a stream of vLLM's own. Copies run on a stream of
theirs, so that neither waits for the other. A CPU computes at once, and has no streams.

Nothing here imports vLLM.
"""

import logging
import queue
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

import torch

log = logging.getLogger("vllm.prfaas")


def device_kind(tensor: torch.Tensor) -> str:
    """Return what the bytes of a cache depend on beside its shape."""
    if tensor.device.type != "cpu":
        return tensor.device.type
    amx = " AMX" if torch.cpu._is_amx_tile_supported() else ""
    return f"cpu {torch.backends.cpu.get_cpu_capability()}{amx}"


def started_kernels(device: torch.device) -> torch.Event | None:
    """Return an event after all that this thread has started on the device; None for CPUs, which compute at once."""
    return None if device.type == "cpu" else torch.accelerator.current_stream(device).record_event()


Fail = Callable[[str], None]


class AfterKernels:
    """Makes calls when the kernels that were started before are done: in their order, on a thread of its own."""

    def __init__(self, device: torch.device):
        self._device = device
        self._waiting: queue.SimpleQueue[tuple[torch.Event, Callable[[], None], Fail]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="after-kernels", daemon=True).start()

    def call(self, then: Callable[[], None], fail: Fail) -> None:
        """Make a call then; `fail` is called with the reason where that cannot be."""
        kernels = started_kernels(self._device)
        if kernels is None:
            then()
        else:
            self._waiting.put((kernels, then, fail))

    def _run(self) -> None:
        while True:
            kernels, then, fail = self._waiting.get()
            try:
                kernels.synchronize()
                then()
            except Exception as error:  # the next call is another request's
                log.exception("prfaas: after kernels")
                fail(f"the step that computed it has failed: {error}")


class CopyStream:
    """Where copies run beside the kernels: within `with stream.used():`, on one thread at a time or several."""

    def __init__(self, device: torch.device):
        self._module: Any = None if device.type == "cpu" else torch.get_device_module(device)
        self._stream = None if self._module is None else self._module.Stream(device)

    def used(self) -> AbstractContextManager[object]:
        return nullcontext() if self._module is None else self._module.stream(self._stream)


def pin(memory: memoryview, device: torch.device) -> None:
    """Let the accelerator reach host memory by itself: its driver would copy once more in between, while we wait."""
    if device.type != "cuda":
        return
    address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
    with torch.cuda.device(device):
        runtime: Any = torch.cuda.cudart()
        status = int(runtime.cudaHostRegister(address, len(memory), 0))
    if status:
        # CUDA keeps the error for who asks next: else vLLM's first kernel would fail of it.
        with suppress(RuntimeError):
            torch.zeros(1, device=device)
        log.warning(
            "prfaas: %d MiB of host memory cannot be pinned (CUDA error %d), so copies are slower: raise the limit on "
            "locked memory, or lower transfer_memory_mib",
            len(memory) >> 20,
            status,
        )
