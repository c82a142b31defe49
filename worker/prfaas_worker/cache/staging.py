"""Copies between an accelerator's cache and host memory, which alone sockets read and write.

The copies run on a stream of their own, so that they overlap the step. What they read must be finished first. The
step's thread marks a point of its work (`mark`). A transfer's thread waits for that mark on the device, then for its
copy on the host. Host memory is pinned: torch keeps it for reuse, so allocating it anew each time is cheap.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from prfaas_worker.cache.memory import CacheMemory
from prfaas_worker.cache.transfer_frames import DeviceMark, TokenSpan


def pin(memory: memoryview) -> None:
    """Let the accelerator reach memory that is shared with the mover at its full speed."""
    address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
    runtime: Any = torch.cuda.cudart()
    torch.cuda.check_error(int(runtime.cudaHostRegister(address, len(memory), 0)))


class Staging:
    """Moves rows and states of one memory. Any thread may use it; each call returns when the copy is done."""

    def __init__(self, memory: CacheMemory):
        self._memory = memory
        self._is_gpu = memory.device.type == "cuda"
        self._stream = torch.cuda.Stream(memory.device) if self._is_gpu else None

    def mark(self) -> DeviceMark:
        """Mark the device's work so far; called in `on_layer`, on the thread that runs the model."""
        if not self._is_gpu:
            return DeviceMark(None)
        # blocking: who waits for it sleeps, instead of taking a core from the step.
        event = torch.cuda.Event(blocking=True)
        event.record(torch.cuda.current_stream(self._memory.device))
        return DeviceMark(event)

    @torch.inference_mode()
    def read_rows(self, layer: int, pages: Sequence[int], span: TokenSpan, after: DeviceMark) -> dict[str, memoryview]:
        """Copy a layer's rows of `span` from `pages`, all pages of the sequence up to `span.end`, once `after` is
        reached. Returns bytes by tensor name, read-only; contiguous, tokens first."""
        page_tokens = self._memory.geometry.page_tokens
        first, last = span.start // page_tokens, -(-span.end // page_tokens)
        with self._aside(after):
            index = self._device_index(pages[first:last])
            parts = {
                name: rows[index].flatten(0, 1)[span.start - first * page_tokens : span.end - first * page_tokens]
                for name, rows in self._memory.rows(layer).items()
            }
            return self._to_host(parts)

    @torch.inference_mode()
    def read_state(self, layer: int, slot: int, after: DeviceMark) -> dict[str, memoryview]:
        """Copy one layer's state in a slot, by tensor name; the sequence may not continue before this returns."""
        with self._aside(after):
            return self._to_host({name: state[slot] for name, state in self._memory.states(layer).items()})

    def room(self, nbytes: int) -> memoryview:
        """Pinned host memory to receive into; it lives as long as the view."""
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=self._is_gpu).numpy().data

    @torch.inference_mode()
    def land_rows(self, layer: int, pages: Sequence[int], span: TokenSpan, received: dict[str, memoryview]) -> None:
        """Copy received rows (see `read_rows`) into the pages of a sequence."""
        page_tokens = self._memory.geometry.page_tokens
        with self._aside(DeviceMark(None)):
            at = torch.arange(span.start, span.end, device=self._memory.device)
            table = self._device_index(pages)
            for spec in self._memory.geometry.layers[layer].rows:
                landed = self._to_device(received[spec.name]).view(getattr(torch, spec.dtype)).view(-1, *spec.shape)
                self._memory.rows(layer)[spec.name][table[at // page_tokens], at % page_tokens] = landed
            self._finish()

    @torch.inference_mode()
    def land_state(self, layer: int, slot: int, received: dict[str, memoryview]) -> None:
        with self._aside(DeviceMark(None)):
            for spec in self._memory.geometry.layers[layer].state:
                landed = self._to_device(received[spec.name]).view(getattr(torch, spec.dtype)).view(spec.shape)
                self._memory.states(layer)[spec.name][slot] = landed
            self._finish()

    @torch.inference_mode()
    def land_paged_state(self, layer: int, pages: Sequence[int], received: dict[str, memoryview]) -> None:
        """Copy one layer's state into pages, where a slot can load it from."""
        memory = self._memory.pages.view(-1)
        with self._aside(DeviceMark(None)):
            for spec in self._memory.geometry.layers[layer].state:
                landed, at = self._to_device(received[spec.name]), 0
                for begin, end in self._memory.geometry.state_places(layer, spec.name, pages):
                    memory[begin:end] = landed[at : at + end - begin]
                    at += end - begin
            self._finish()

    def _aside(self, after: DeviceMark) -> "torch.cuda.StreamContext":
        if self._stream is not None and after.event is not None:
            self._stream.wait_event(after.event)
        return torch.cuda.stream(self._stream)

    def _device_index(self, pages: Sequence[int]) -> Tensor:
        return torch.tensor(list(pages), dtype=torch.int64).to(self._memory.device)

    def _to_host(self, parts: dict[str, Tensor]) -> dict[str, memoryview]:
        flat = {name: part.reshape(-1).view(torch.uint8) for name, part in parts.items()}
        host = {
            name: torch.empty(part.shape, dtype=torch.uint8, pin_memory=self._is_gpu) for name, part in flat.items()
        }
        for name, part in flat.items():
            host[name].copy_(part, non_blocking=True)
        self._finish()
        return {name: part.numpy().data for name, part in host.items()}

    def _to_device(self, data: memoryview) -> Tensor:
        return torch.frombuffer(data, dtype=torch.uint8).to(self._memory.device, non_blocking=True)

    def _finish(self) -> None:
        if self._stream is not None:
            done = torch.cuda.Event(blocking=True)
            done.record(self._stream)
            done.synchronize()
