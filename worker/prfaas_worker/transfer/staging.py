"""Cache between the GPU and host memory, for transfers: sockets read and write host memory only.

Copies run on a stream of their own, so that they overlap the step; what they read must be finished first. The step's
thread marks a point of its work (`mark`), and a transfer's thread waits for that mark on the device, then for its copy
on the host. Host memory is pinned: torch keeps it for reuse, so allocating it anew each time is cheap. On a CPU the
same calls copy once.

Rows and states travel in the order of a layer's specification, each tensor's bytes contiguous.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from prfaas_worker.cache.memory import CacheMemory


class Span(NamedTuple):
    """Tokens `start` up to `end` of a sequence."""

    start: int
    end: int


class Mark:
    """A point in the work of the thread that made it."""

    def __init__(self, event: "torch.cuda.Event | None"):
        self.event = event


class Staging:
    """Moves rows and states of one memory. Any thread may use it; each call returns when its bytes are there."""

    def __init__(self, memory: CacheMemory):
        self._memory = memory
        self._is_gpu = memory.device.type == "cuda"
        self._stream = torch.cuda.Stream(memory.device) if self._is_gpu else None

    def mark(self) -> Mark:
        """Remember what was given to the device so far; called in `on_layer`, on the thread that runs the model."""
        if not self._is_gpu:
            return Mark(None)
        event = torch.cuda.Event(blocking=True)
        event.record(torch.cuda.current_stream(self._memory.device))
        return Mark(event)

    @torch.inference_mode()
    def read_rows(self, layer: int, pages: Sequence[int], span: Span, after: Mark) -> dict[str, memoryview]:
        """Bytes of a layer's rows.

        Args:
            layer: its index.
            pages: all pages of the sequence up to `span.end`, in order.
            span: the tokens.
            after: the mark that was made when they stood in the pages.

        Returns:
            By tensor name, read-only once the caller has it; contiguous, tokens first.

        """
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
    def read_state(self, layer: int, slot: int, after: Mark) -> dict[str, memoryview]:
        """Bytes of one layer's state in a slot, by tensor name; the sequence may not go on before this returns."""
        with self._aside(after):
            return self._to_host({name: state[slot] for name, state in self._memory.states(layer).items()})

    def room(self, nbytes: int) -> memoryview:
        """Pinned host memory to receive into; it lives as long as the view."""
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=self._is_gpu).numpy().data

    @torch.inference_mode()
    def land_rows(self, layer: int, pages: Sequence[int], span: Span, received: dict[str, memoryview]) -> None:
        """Put received rows into the pages of a sequence; they stand there on return.

        Args:
            layer: its index.
            pages: all pages of the sequence up to `span.end`, in order.
            span: the tokens.
            received: by tensor name, as `read_rows` gives them.

        """
        page_tokens = self._memory.geometry.page_tokens
        with self._aside(Mark(None)):
            at = torch.arange(span.start, span.end, device=self._memory.device)
            table = self._device_index(pages)
            for spec in self._memory.geometry.layers[layer].rows:
                given = self._to_device(received[spec.name]).view(spec.torch_dtype).view(-1, *spec.shape)
                self._memory.rows(layer)[spec.name][table[at // page_tokens], at % page_tokens] = given
            self._finish()

    @torch.inference_mode()
    def land_state(self, layer: int, slot: int, received: dict[str, memoryview]) -> None:
        """Put one layer's received state into a slot; it stands there on return."""
        with self._aside(Mark(None)):
            for spec in self._memory.geometry.layers[layer].state:
                given = self._to_device(received[spec.name]).view(spec.torch_dtype).view(spec.shape)
                self._memory.states(layer)[spec.name][slot] = given
            self._finish()

    def _aside(self, after: Mark) -> "torch.cuda.StreamContext":
        """Run what follows on the copying stream, behind a mark."""
        if self._stream is not None and after.event is not None:
            self._stream.wait_event(after.event)
        return torch.cuda.stream(self._stream)

    def _device_index(self, pages: Sequence[int]) -> Tensor:
        return torch.tensor(list(pages), dtype=torch.int64).to(self._memory.device)

    def _to_host(self, parts: dict[str, Tensor]) -> dict[str, memoryview]:
        """Copy to pinned memory, and wait for it."""
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
        """Wait, on the host, for this thread's copies."""
        if self._stream is not None:
            done = torch.cuda.Event(blocking=True)
            done.record(self._stream)
            done.synchronize()
