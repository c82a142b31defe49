"""The source's side of one rank: offers the caches of its requests, and gives their blocks to the mover.

Nothing is copied before a connection can send it, and nothing twice. Rows and states stay in the blocks where vLLM has
computed them. It keeps a request's blocks until its offer is over, and the prompt of a source ends at its goal: no step
follows that would write the state's block again (scheduling.py). A request whose blocks are taken away is revoked
first: a copy that runs is waited for, and no other begins. What a destination has by then is not whole, and not used.
"""

import logging
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from prfaas.errors import ConfigError
from prfaas_transfer.mover.client import MoverClient
from prfaas_transfer.mover.messages import AnnounceCache, CopyPart
from prfaas_transfer.mover.tables import Sources
from prfaas_vllm.blocks import RankCache, frame_tokens, read_blocks, read_slice
from prfaas_vllm.device import AfterKernels
from prfaas_vllm.scheduling import BlockIds, SourceStart, SourceStep
from prfaas_vllm.slices import RankSlice, slices_of

log = logging.getLogger("vllm.prfaas")


@dataclass
class OfferedBlocks:
    """The cache of one request, in slices by their offers' keys. The mover knows of `put_tokens` of each group."""

    start: SourceStart
    slices: Mapping[str, RankSlice]
    began: float = field(default_factory=time.monotonic)
    block_ids: BlockIds = ()
    is_finished: bool = False
    put_tokens: dict[int, int] = field(default_factory=dict)


class SourceSide:
    """vLLM's worker calls from one thread, and the mover's client `load` and `end` from another."""

    def __init__(self, rank: RankCache, mover: MoverClient, sources: Sources[OfferedBlocks]):
        self._rank, self._mover, self._sources = rank, mover, sources
        self._after_kernels = AfterKernels(rank.device)

    def revoke(self, reasons: Mapping[str, str]) -> None:
        """Give nothing any more of these requests."""
        for request_id, reason in reasons.items():
            cache = self._sources.revoke(request_id)
            for key in cache.slices if cache is not None else ():
                self._mover.fail(key, reason)

    def announce(self, starts: Iterable[SourceStart]) -> None:
        """Before the model runs: offer what new requests will have."""
        for start in starts:
            self._announce(start)

    def end_step(self, steps: Iterable[SourceStep]) -> None:
        """After the model ran: hand on what it computed."""
        for step in steps:
            cache = self._sources.cache_of(step.request_id)
            if cache is not None:
                self._put(cache, step)

    def load(self, key: str, part: CopyPart, room: memoryview) -> None:
        group = self._rank.groups[part.group]
        with self._sources.copying(key) as cache, self._rank.copies.used():
            tensors, cuts = group.tensors[part.layer], cache.slices[key].cuts
            start_token = part.start_token if part.tokens else cache.start.goal
            blocks = group.blocks_of(cache.block_ids[group.number], start_token, part.tokens)
            if cuts:
                read_slice(tensors, blocks, room, cuts[part.group])
            else:
                read_blocks(tensors, blocks, room)

    def _announce(self, start: SourceStart) -> None:
        leg = start.leg
        common = (leg.transfer_id, leg.epoch, leg.token, start.request_id, start.goal, start.prompt)
        try:
            parts = slices_of(self._rank.groups, self._rank.own, leg.ranks, is_source=True)
        except ConfigError as error:
            log.warning("prfaas: the cache of %s is not offered: %s", start.request_id, error)
            parts = ()
        messages = [AnnounceCache(*common, part.wire) for part in parts]
        slices = {message.key: part for message, part in zip(messages, parts, strict=True)}
        self._sources.add(leg.transfer_id, start.request_id, slices, OfferedBlocks(start, slices))
        for message in messages:
            self._mover.announce(message)

    def _put(self, cache: OfferedBlocks, step: SourceStep) -> None:
        if cache.is_finished:
            # Where a load of another connector has failed. What was given by then may be of no use.
            self.revoke({step.request_id: "vLLM computes the end of the prompt again"})
            return
        goal, is_last = cache.start.goal, step.computed >= cache.start.goal
        cache.block_ids, cache.is_finished = step.block_ids, is_last
        parts = [
            part
            for number, group in enumerate(self._rank.groups)
            if group.layout.kind == "attention"
            for part in self._new_rows(cache, number, step.computed)
        ]
        if is_last:
            states = self._states(cache)
            if states is None:
                reason = f"no state at token {goal}: vLLM took its block between {step.before} and {step.computed}"
                self.revoke({step.request_id: reason})
                return
            parts += states
        self._after_kernels.call(
            lambda: self._tell_mover(cache, parts, is_last=is_last),
            lambda reason: self.revoke({step.request_id: reason}),
        )

    def _tell_mover(self, cache: OfferedBlocks, parts: list[CopyPart], *, is_last: bool) -> None:
        for key, crossing in cache.slices.items():
            self._mover.put(key, [part for part in parts if crossing.has(part.group, part.layer)])
            if is_last:
                self._mover.finish(key, time.monotonic() - cache.began)

    def _new_rows(self, cache: OfferedBlocks, number: int, computed: int) -> list[CopyPart]:
        """Return the parts of a group's blocks that were filled since the last step; of all layers, block by block."""
        layout, goal = self._rank.groups[number].layout, cache.start.goal
        first = cache.put_tokens.get(number, 0)
        full = computed // layout.row_tokens * layout.row_tokens
        end = layout.rows_span(0, goal)[1] if computed >= goal else full
        step = frame_tokens(layout)
        cache.put_tokens[number] = max(first, end)
        return [
            CopyPart(number, layer, start, min(step, end - start))
            for start in range(first, end, step)
            for layer in layout.layers
        ]

    def _states(self, cache: OfferedBlocks) -> list[CopyPart] | None:
        """Return the states at the goal, where a step has ended; None if vLLM has taken a block of them back."""
        parts: list[CopyPart] = []
        for number, group in enumerate(self._rank.groups):
            if group.layout.kind == "linear":
                if 0 in group.blocks_of(cache.block_ids[group.number], cache.start.goal, 0):
                    return None
                parts += [CopyPart(number, layer) for layer in group.layout.layers]
        return parts
