"""The memory of an emulated cache: bytes for the mover to send and to receive into, which nothing here reads or writes.

What a page or slot holds means nothing, so copies between them are left out: on a device they take no time that counts.
"""

from collections.abc import Sequence

from prfaas_worker.cache_spec import CacheGeometry
from prfaas_worker.memory import share_memory


class EmulatedMemory:
    """Pages, and slots behind them, in one file that the mover maps. See `PagedMemory`."""

    def __init__(self, geometry: CacheGeometry, *, num_pages: int, num_slots: int):
        self.geometry = geometry
        self.num_pages, self.num_slots = num_pages, num_slots
        self._slots_at = num_pages * geometry.page_bytes
        self.descriptor: int | None
        self.descriptor, shared = share_memory(self, self._slots_at + num_slots * geometry.slot_bytes)
        self._bytes = memoryview(shared)

    def set_pages(self, _slot: int, _first: int, _pages: Sequence[int]) -> None: ...

    def clear_slot(self, _slot: int) -> None: ...

    def copy_slot(self, _source: int, _target: int) -> None: ...

    def copy_page(self, _source: int, _target: int) -> None: ...

    def save_state(self, _slot: int, _pages: Sequence[int]) -> None: ...

    def load_state(self, _pages: Sequence[int], _slot: int) -> None: ...

    def row_bytes(self, layer: int, name: str, pages: Sequence[int], span: tuple[int, int]) -> list[memoryview]:
        return [self._bytes[begin:end] for begin, end in self.geometry.row_places(layer, name, pages, span)]

    def state_bytes(self, layer: int, name: str, slot: int) -> memoryview:
        size = next(tensor.nbytes for tensor in self.geometry.layers[layer].state if tensor.name == name)
        begin = self._slots_at + slot * self.geometry.slot_bytes + self.geometry.state_offsets[layer, name]
        return self._bytes[begin : begin + size]

    def paged_state_bytes(self, layer: int, name: str, pages: Sequence[int]) -> list[memoryview]:
        return [self._bytes[begin:end] for begin, end in self.geometry.state_places(layer, name, pages)]
