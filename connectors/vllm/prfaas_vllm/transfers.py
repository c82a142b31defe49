"""All transfers of one rank: both sides, their mover, and what vLLM hears of them."""

from collections.abc import Sequence, Set

from prfaas_transfer.mover.client import MoverClient
from prfaas_transfer.mover.messages import CopyPart, EndedFetch, MoverOptions
from prfaas_transfer.mover.tables import Fetches, Sources
from prfaas_vllm.blocks import VllmGroup, rank_cache
from prfaas_vllm.destination import DestinationSide, FetchedBlocks
from prfaas_vllm.device import pin
from prfaas_vllm.ranks import RankOf
from prfaas_vllm.scheduling import NOTHING, StepPlan
from prfaas_vllm.slices import AllRanks
from prfaas_vllm.source import OfferedBlocks, SourceSide


class RankTransfers:
    """vLLM's worker calls from one thread, the mover's client from another."""

    def __init__(self, groups: Sequence[VllmGroup], options: MoverOptions, all_ranks: AllRanks):
        self.rank = rank_cache(groups, RankOf(options.rank, options.ranks))
        self._failed: set[str] = set()  # Requests of which other ranks are to hear.
        self._unawaited: set[str] = set()
        self._sources: Sources[OfferedBlocks] = Sources()
        self._fetches: Fetches[FetchedBlocks] = Fetches()
        self.mover = MoverClient(options, self, self._sources.end, self._end_fetch)
        pin(self.mover.shared, self.rank.device)
        self.source = SourceSide(self.rank, self.mover, self._sources)
        self.destination = DestinationSide(self.rank, self.mover, self._fetches, all_ranks)

    def revoke(self, plan: StepPlan) -> None:
        """Before any block is written again: give nothing any more of requests that lose theirs in this step."""
        if plan.revoked:
            self.source.revoke(plan.revoked)
            self._unawaited |= plan.unawaited

    def begin(self, plan: StepPlan) -> None:
        """Before the model runs."""
        if plan is not NOTHING:
            self.destination.complete(plan.fetched)
            self.destination.cancel(plan.in_vain)
            self.source.announce(plan.starts)
        self.mover.begin_step()  # what vLLM hears of requests from now on is in a later step's plan

    def fetch(self, plan: StepPlan) -> None:
        """Ask for the caches that this step's new destinations wait for; decline those that they have."""
        if plan is not NOTHING:
            self.destination.decline(plan.declined)
            self.destination.fetch(plan.fetches)

    def end_step(self, plan: StepPlan) -> None:
        """After the model ran."""
        if plan.steps:
            self.source.end_step(plan.steps)

    def results(self, over: Set[str]) -> tuple[set[str], set[str], set[str]]:
        """Return requests whose caches were sent, were received, and were received in vain (these are received, too).

        Requests that are `over` are so for vLLM, which keeps the blocks of sources until they are reported here."""
        self.mover.end_step()
        if not self._sources and not self._fetches:
            return set(), set(), set()
        self.destination.cancel(over)
        ended, news = self._sources.take_sent(over), self._fetches.take()
        sent = ended - self._unawaited
        self._unawaited -= ended
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
