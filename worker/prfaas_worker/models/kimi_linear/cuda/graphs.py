"""Decoding steps as captured graphs: a step is hundreds of short kernels; launching them singly would outlast them.

A graph is fixed in its number of rows and its addresses. So one is captured for each of a few sizes, over buffers of
its own for tokens, slots and lengths; a step is copied into the next larger one, and the rows left over are PADDING,
which touches no cache. Page tables and cache stand at fixed addresses already, and no kernel's grid depends on a
length.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from prfaas_worker.cache.memory import CacheMemory
from prfaas_worker.models.base import Decodes
from prfaas_worker.models.kimi_linear.cuda.step import PADDING, Step, decode_step

_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
_WARM_UPS = 2


class _Captured(NamedTuple):
    graph: torch.cuda.CUDAGraph
    tokens: Tensor
    decodes: Decodes
    hidden: Tensor


def sizes_for(num_slots: int) -> list[int]:
    """Rows of the graphs for up to `num_slots` sequences, largest first: later ones fit into its memory."""
    largest = next((size for size in _SIZES if size >= num_slots), _SIZES[-1])
    return [size for size in reversed(_SIZES) if size <= largest]


class DecodeGraphs:
    """Graphs of a model's decoding step over one memory."""

    def __init__(self, run: Callable[[Tensor, Step], Tensor], memory: CacheMemory):
        """Capture all sizes; takes seconds, most of them for compiling kernels.

        Args:
            run: runs tokens int64 [B] eagerly; returns hidden states fp32 [B, hidden_size].
            memory: that it runs over; its slots bound the sequences of a step.

        """
        self._device, self._graphs = memory.device, {}
        pool = torch.cuda.graph_pool_handle()
        for size in sizes_for(memory.num_slots):
            self._graphs[size] = self._capture(run, size, pool)

    def takes(self, decodes: Decodes) -> bool:
        """Whether there is a graph for so many sequences."""
        return decodes.slots.shape[0] <= max(self._graphs)

    def run(self, tokens: Tensor, decodes: Decodes) -> Tensor:
        """Replay a step on the current stream; returns hidden states fp32 [B, hidden_size] of the caller's own."""
        count = tokens.shape[0]
        captured = self._graphs[min(size for size in self._graphs if size >= count)]
        captured.tokens[:count].copy_(tokens)
        captured.decodes.slots[:count].copy_(decodes.slots)
        captured.decodes.slots[count:].fill_(PADDING)
        captured.decodes.lengths[:count].copy_(decodes.lengths)
        captured.graph.replay()
        return captured.hidden[:count].clone()

    @torch.inference_mode()
    def _capture(self, run: Callable[[Tensor, Step], Tensor], size: int, pool: Any) -> _Captured:
        tokens = torch.zeros(size, dtype=torch.int64, device=self._device)
        slots = torch.full_like(tokens, PADDING)
        decodes = Decodes(slots, torch.zeros_like(tokens), 0)
        step = decode_step(decodes)
        aside = torch.cuda.Stream(self._device)
        aside.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(aside):
            for _ in range(_WARM_UPS):
                run(tokens, step)
        torch.cuda.current_stream(self._device).wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            hidden = run(tokens, step)
        return _Captured(graph, tokens, decodes, hidden)
