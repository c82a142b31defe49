"""What the engine and its mover share: the options, the map of a CPU's cache, the copies of an accelerator's."""

from typing import Final

import numpy as np

from prfaas.wire.frames import Address
from prfaas.wire.receive_ledger import LayerRows, LayerState
from prfaas_transfer.cache import CacheLayout, CacheMap
from prfaas_transfer.mover.messages import CopyPart, MoverOptions
from prfaas_transfer.send import Frame
from prfaas_worker.cache.transfer_frames import BLOCK_BYTES, CachePlace
from prfaas_worker.cache_spec import PagedMemory
from prfaas_worker.options import Options

COPY_THREADS: Final = 4
"""Threads that copy between an accelerator and the mover's slots: each may wait for a step's work."""


def copy_out(frame: Frame, room: memoryview) -> None:
    """Copy a frame's payload from an accelerator's cache into a slot."""
    with frame.load(frame.header) as payload:
        at = 0
        for piece in payload:  # numpy copies without the interpreter's lock
            np.copyto(np.frombuffer(room[at : at + len(piece)], np.uint8), np.frombuffer(piece, np.uint8))
            at += len(piece)


def copy_in(layout: CacheLayout, place: CachePlace, part: CopyPart, received: memoryview) -> None:
    """Copy a received part from a slot into an accelerator's cache."""
    pieces, at = [], 0
    for tensor in layout.groups[part.group].tensors:
        end = at + (part.tokens or 1) * tensor.nbytes
        pieces.append(received[at:end])
        at = end
    where = LayerRows(*part) if part.tokens else LayerState(part.group, part.layer)
    # Of any transfer: only the groups count.
    place.land(layout.manifest(Address("", 0), 0, 0), where, pieces)


def mover_options(options: Options, layout: CacheLayout, memory: PagedMemory) -> MoverOptions:
    """Return what the mover of this engine needs to know."""
    is_mapped = memory.descriptor is not None
    return MoverOptions(
        host=options.host,
        data_port=options.data_port,
        fingerprint=layout.fingerprint,
        groups=layout.groups,
        slot_bytes=max(BLOCK_BYTES, *(group.nbytes for group in layout.groups)),
        cluster=options.cluster,
        tls_dir=options.tls_dir,
        egress_mbps=options.egress_mbps,
        egress_file=options.egress_file,
        transfer_memory_mib=options.transfer_memory_mib,
        wire_codec=options.wire_codec,
        map=_map_of(layout, memory) if is_mapped else None,
        max_offers=options.slots + options.max_waiting,
        copy_threads=0 if is_mapped else COPY_THREADS,
        log_place=f"{options.place} mover",
        log_format=options.log_format,
    )


def _map_of(layout: CacheLayout, memory: PagedMemory) -> CacheMap:
    geometry = memory.geometry
    offsets_of = {"attention": geometry.row_offsets, "linear": geometry.state_offsets}
    return CacheMap(
        page_tokens=geometry.page_tokens,
        page_bytes=geometry.page_bytes,
        pages=memory.num_pages,
        slot_bytes=geometry.slot_bytes,
        slots=memory.num_slots,
        offsets=tuple(
            tuple(
                tuple(offsets_of[group.kind][layer, tensor.name] for tensor in group.tensors) for layer in group.layers
            )
            for group in layout.groups
        ),
    )
