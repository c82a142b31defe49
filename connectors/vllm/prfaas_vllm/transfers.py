"""All transfers of one rank: both sides, their mover, and what vLLM hears of them."""

import threading
from collections.abc import Sequence, Set

from prfaas_transfer.mover.client import MoverClient
from prfaas_transfer.mover.messages import CopyPart, EndedFetch, MoverOptions
from prfaas_transfer.mover.tables import Fetches, Sources
from prfaas_vllm.blocks import VllmGroup, rank_cache
from prfaas_vllm.destination import DestinationSide, FetchedBlocks
from prfaas_vllm.device import pin
from prfaas_vllm.ranks import RankOf
from prfaas_vllm.scheduling import StepPlan
from prfaas_vllm.shares import AllRanks
from prfaas_vllm.source import OfferedBlocks, SourceSide

IDLE_SECONDS = 0.005
"""A step in which no model runs waits so long for a transfer's end, instead of taking a core."""


class RankTransfers:
    """vLLM's worker calls from one thread, the mover's client from another."""

    def __init__(self, groups: Sequence[VllmGroup], options: MoverOptions, all_ranks: AllRanks):
        self.rank = rank_cache(groups, RankOf(options.rank, options.ranks))
        self._news = threading.Event()
        self._failed: set[str] = set()  # Requests of which other ranks are to hear.
        self._sources: Sources[OfferedBlocks] = Sources(self._news.set)
        self._fetches: Fetches[FetchedBlocks] = Fetches(self._news.set)
        self.mover = MoverClient(options, self, self._sources.end, self._end_fetch)
        pin(self.mover.shared, self.rank.device)
        self.source = SourceSide(self.rank, self.mover, self._sources)
        self.destination = DestinationSide(self.rank, self.mover, self._fetches, all_ranks)

    def revoke(self, plan: StepPlan) -> None:
        """Before any block is written again: give nothing any more of requests that lose theirs in this step."""
        self.source.revoke(plan.revoked)

    def begin(self, plan: StepPlan) -> None:
        """Before the model runs."""
        self.destination.complete(plan.fetched)
        self.destination.cancel(plan.in_vain)
        self.source.announce(plan.starts)
        self.mover.begin_step()  # what vLLM hears of requests from now on is in a later step's plan

    def fetch(self, plan: StepPlan) -> None:
        """Ask for the caches that this step's new destinations wait for; decline those that they have."""
        self.destination.decline(plan.declined)
        self.destination.fetch(plan.fetches)

    def end_step(self, plan: StepPlan) -> None:
        """After the model ran."""
        self.source.end_step(plan.steps)

    def results(self, over: Set[str], *, is_idle: bool) -> tuple[set[str], set[str], set[str]]:
        """Return requests whose caches were sent, were received, and were received in vain (these are received, too).

        Requests that are `over` are so for vLLM, which keeps the blocks of sources until they are reported here."""
        self.mover.end_step()
        self.destination.cancel(over)
        if is_idle and (self._sources or self._fetches):
            self._news.wait(IDLE_SECONDS)
        self._news.clear()
        sent, news = self._sources.take_sent(over), self._fetches.take()
        self._failed |= news.newly_failed
        return sent, news.received, news.failed

    def take_failed(self) -> set[str]:
        """Return the requests whose fetch has failed here since the last call."""
        failed, self._failed = self._failed, set()
        return failed

    # The mover's client calls these.

    def load(self, key: str, part: CopyPart, room: memoryview) -> None:
        self.source.load(key, part, room)

    def land(self, key: str, part: CopyPart, received: memoryview) -> None:
        self.destination.land(key, part, received)

    def _end_fetch(self, ended: EndedFetch) -> None:
        self.destination.end(ended)
