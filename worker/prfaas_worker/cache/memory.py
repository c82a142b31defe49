"""The bytes of the hybrid cache on one device: a pool of pages for everything cached, and slots for running states.

A *page* has room for the rows of `page_tokens` tokens in all layers, layer after layer. The same pages, taken as bytes,
hold states: checkpoints, and those of sequences without a slot. A *slot* is the working state of one running sequence.
Kernels change it in place, so it is dense, and copying it to or from pages is one operation. `table[slot]` lists its
sequence's pages in order of tokens.

Memory that is reserved but not written costs nothing on a CPU. `Blocks` knows who holds which page.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from prfaas_worker.cache_spec import CacheGeometry
from prfaas_worker.memory import share_memory


def bytes_of(tensor: Tensor) -> memoryview:
    """View a contiguous CPU tensor's memory as bytes, without a copy."""
    return tensor.view(-1).view(torch.uint8).numpy().data


class CacheMemory:
    """Pages, slots and page tables of one device. A CPU's `is_shared` pages and slots are the file of `descriptor`, one
    behind the other, for other processes to map."""

    def __init__(
        self,
        geometry: CacheGeometry,
        *,
        num_pages: int,
        num_slots: int,
        max_context: int,
        device: torch.device | str = "cpu",
        is_shared: bool = False,
    ):
        self.geometry = geometry
        self.num_pages, self.num_slots = num_pages, num_slots
        self.device = torch.device(device)
        self.descriptor: int | None = None
        # Writable outside inference mode too, as transfers write, wherever they were allocated.
        with torch.inference_mode(False):
            if is_shared:
                self.pages, self.slots = self._share()
            else:
                self.pages = torch.empty(num_pages, geometry.page_bytes, dtype=torch.uint8, device=device)
                self.slots = torch.zeros(num_slots, geometry.slot_bytes, dtype=torch.uint8, device=device)
            columns = geometry.pages_for(max_context)
            self.table = torch.zeros(num_slots, columns, dtype=torch.int64, device=device)
            layers = range(len(geometry.layers))
            self._rows = [self._views(self.pages, index, True) for index in layers]
            self._states = [self._views(self.slots, index, False) for index in layers]
        self._page_bytes = bytes_of(self.pages) if self.device.type == "cpu" else memoryview(b"")

    def rows(self, layer: int) -> dict[str, Tensor]:
        """Row tensors of a layer by name, [num_pages, page_tokens, *shape], as views of the pages."""
        return self._rows[layer]

    def states(self, layer: int) -> dict[str, Tensor]:
        """State tensors of a layer by name, [num_slots, *shape], as views of the slots."""
        return self._states[layer]

    def set_pages(self, slot: int, first: int, pages: Sequence[int]) -> None:
        """Write pages into a slot's table from column `first` on."""
        if pages:
            self.table[slot, first : first + len(pages)] = torch.tensor(pages, dtype=torch.int64)

    def clear_slot(self, slot: int) -> None:
        self.slots[slot].zero_()

    def copy_slot(self, source: int, target: int) -> None:
        self.slots[target].copy_(self.slots[source])

    def copy_page(self, source: int, target: int) -> None:
        self.pages[target].copy_(self.pages[source])

    def save_state(self, slot: int, pages: Sequence[int]) -> None:
        self.pages[torch.tensor(pages)] = self.slots[slot].view(len(pages), -1)

    def load_state(self, pages: Sequence[int], slot: int) -> None:
        self.slots[slot].view(len(pages), -1).copy_(self.pages[torch.tensor(pages)])

    def row_bytes(self, layer: int, name: str, pages: Sequence[int], span: tuple[int, int]) -> list[memoryview]:
        """Writable bytes of a row tensor's tokens span[0] to span[1], one piece a page. CPU memory only."""
        places = self.geometry.row_places(layer, name, pages, span)
        return [self._page_bytes[begin:end] for begin, end in places]

    def state_bytes(self, layer: int, name: str, slot: int) -> memoryview:
        """Writable bytes of a state tensor in a slot. CPU memory only."""
        return bytes_of(self.states(layer)[name][slot])

    def paged_state_bytes(self, layer: int, name: str, pages: Sequence[int]) -> list[memoryview]:
        """Writable bytes of a state tensor in pages, piece by piece. CPU memory only."""
        return [self._page_bytes[begin:end] for begin, end in self.geometry.state_places(layer, name, pages)]

    def _share(self) -> tuple[Tensor, Tensor]:
        page_bytes, slot_bytes = self.geometry.page_bytes, self.geometry.slot_bytes
        slots_at = self.num_pages * page_bytes
        self.descriptor, shared = share_memory(self, slots_at + self.num_slots * slot_bytes)
        memory = torch.frombuffer(shared, dtype=torch.uint8)
        return memory[:slots_at].view(-1, page_bytes), memory[slots_at:].view(-1, slot_bytes)

    def _views(self, buffer: Tensor, layer: int, is_rows: bool) -> dict[str, Tensor]:
        """A layer's tensors by name, [len(buffer), page_tokens, *shape] for rows, [len(buffer), *shape] for states."""
        spec, geometry = self.geometry.layers[layer], self.geometry
        offsets, lead = (geometry.row_offsets, (geometry.page_tokens,)) if is_rows else (geometry.state_offsets, ())
        views = {}
        for tensor in spec.rows if is_rows else spec.state:
            offset, size = offsets[layer, tensor.name], math.prod(lead) * tensor.nbytes
            part = buffer[:, offset : offset + size].view(getattr(torch, tensor.dtype))
            views[tensor.name] = part.view(buffer.shape[0], *lead, *tensor.shape)
        return views
