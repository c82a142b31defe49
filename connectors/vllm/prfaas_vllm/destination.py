"""The destination's side of one rank: has the mover fetch the caches of its requests, and lands them in their blocks.

A request is in no step before its whole cache has come to all ranks, so nothing reads these blocks meanwhile. What came
to one rank alone is given to the others at the start of a step (slices.py). A cache that does not come whole costs time
only: vLLM computes the prompt.
"""

import logging
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass

import torch

from prfaas.errors import ConfigError, PeerError
from prfaas_transfer.mover.client import MoverClient
from prfaas_transfer.mover.messages import CopyPart, DeclineCache, EndedFetch, FetchCache
from prfaas_transfer.mover.tables import Fetches
from prfaas_vllm.blocks import RankCache, write_blocks, write_slice
from prfaas_vllm.device import started_kernels
from prfaas_vllm.scheduling import DeclineFetch, Fetching
from prfaas_vllm.slices import AllRanks, RankSlice, complete, slices_of

log = logging.getLogger("vllm.prfaas")


@dataclass
class FetchedBlocks:
    """The cache of one request, in slices by their fetches' keys."""

    fetching: Fetching
    slices: Mapping[str, RankSlice]


class DestinationSide:
    """vLLM's worker calls from one thread, and the mover's client `land` and `end` from another."""

    def __init__(self, rank: RankCache, mover: MoverClient, fetches: Fetches[FetchedBlocks], all_ranks: AllRanks):
        self._rank, self._mover, self._fetches, self._all_ranks = rank, mover, fetches, all_ranks
        self._completing: torch.Event | None = None  # After the last kernel that completes a cache.

    def complete(self, fetched: Iterable[Fetching]) -> None:
        """Before the model runs: complete the caches that have come to all ranks."""
        for each in fetched:
            if complete(self._rank.groups, self._rank.own, each, self._all_ranks):
                self._completing = started_kernels(self._rank.device)

    def fetch(self, wanted: Iterable[Fetching]) -> None:
        """Ask for the caches that new requests wait for."""
        for fetching in wanted:
            messages, slices, reason = self._messages(fetching)
            self._fetches.add(
                fetching.leg.transfer_id, fetching.request_id, slices, FetchedBlocks(fetching, slices), reason
            )
            if messages:
                self._await_completed()
            for message in messages:
                self._mover.fetch(message)

    def decline(self, declined: Iterable[DeclineFetch]) -> None:
        """Tell the sources of requests that have all of it, or that nobody waits for."""
        for each in declined:
            for message in self._declines(each):
                self._mover.decline(message)

    def cancel(self, request_ids: Set[str]) -> None:
        for key in self._fetches.keys_of(request_ids):
            self._mover.cancel_fetch(key)

    def land(self, key: str, part: CopyPart, received: memoryview) -> None:
        group = self._rank.groups[part.group]
        with self._fetches.copying(key) as cache, self._rank.copies.used():
            tensors, cuts = group.tensors[part.layer], cache.slices[key].cuts
            start_token = part.start_token if part.tokens else cache.fetching.goal
            blocks = group.blocks_of(cache.fetching.block_ids[group.number], start_token, part.tokens)
            # Block 0 is vLLM's null block: it stands for one that was taken back, or never given.
            if 0 in blocks:
                raise PeerError(f"rows from token {start_token} have no block here")
            if cuts:
                write_slice(tensors, blocks, received, cuts[part.group])
            else:
                write_blocks(tensors, blocks, received)

    def end(self, ended: EndedFetch) -> None:
        """Note that a slice came, or that the cache will not be whole: then the other slices are in vain."""
        in_vain = self._fetches.end(ended.key, ended.reason)
        if in_vain is None:
            return
        log.warning("prfaas: %s is computed here, its cache did not come: %s", in_vain.request_id, ended.reason)
        for key in in_vain.keys:
            self._mover.cancel_fetch(key)

    def _messages(self, fetching: Fetching) -> tuple[list[FetchCache], dict[str, RankSlice], str]:
        """Return what to ask for, with its slices by key, or why nothing can come; none of it if others fetch all."""
        try:
            parts = slices_of(self._rank.groups, self._rank.own, fetching.leg.ranks, is_source=False)
        except ConfigError as error:
            log.warning("prfaas: %s is computed here, its cache did not come: %s", fetching.request_id, error)
            return [], {}, str(error)
        messages = [_fetch_message(fetching, part) for part in parts]
        return messages, {message.key: part for message, part in zip(messages, parts, strict=True)}, ""

    def _declines(self, declined: DeclineFetch) -> list[DeclineCache]:
        leg, own = declined.leg, self._rank.own
        try:
            parts = slices_of(self._rank.groups, own, leg.ranks, is_source=False)
        except ConfigError:  # then nothing is offered
            return []
        common = (declined.request_id, leg.transfer_id, leg.epoch, leg.token, leg.host)
        ranks = [own.rank if part.wire is None else part.wire.rank for part in parts]
        ports = [leg.port + part.peer_rank for part in parts]
        return [DeclineCache(*common, port, leg.cluster, rank) for port, rank in zip(ports, ranks, strict=True)]

    def _await_completed(self) -> None:
        """Wait until no cache is being completed. One whose request was aborted meanwhile has lost its blocks, and what
        comes for the next request is not written by the kernels' stream."""
        kernels, self._completing = self._completing, None
        if kernels is not None:
            kernels.synchronize()


def _fetch_message(fetching: Fetching, part: RankSlice) -> FetchCache:
    leg = fetching.leg
    return FetchCache(
        fetching.request_id,
        leg.transfer_id,
        leg.epoch,
        leg.token,
        leg.host,
        leg.port + part.peer_rank,
        leg.cluster,
        fetching.start,
        fetching.goal,
        fetching.prompt,
        part.wire,
    )
