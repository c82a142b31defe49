"""What a taker of a prefill sends first: it has more of the prompt cached than we, and that is quicker than computing.

The decision is `prfaas.routing.lending`'s; here are its facts, and the intake that the offer's connections then fill.
It is made once, when the prompt is admitted: until then its taker waits for WELCOME.
"""

import logging
import threading
from collections.abc import Callable
from typing import Final

import msgspec

from prfaas.routing.lending import LendingFacts, decide_lending
from prfaas.wire.frames import TO_GIVER
from prfaas.wire.receipt import Receipt
from prfaas_worker.engine.events import Borrowed
from prfaas_worker.engine.profile import Profiler
from prfaas_worker.engine.runner import Runner
from prfaas_worker.engine.sequences import Phase, Sequence
from prfaas_worker.transfer.codecs import DECODABLE
from prfaas_worker.transfer.counters import TransferCounters
from prfaas_worker.transfer.intake import Intake
from prfaas_worker.transfer.offers import Offer
from prfaas_worker.transfer.traffic import Traffic

log = logging.getLogger(__name__)

UNKNOWN_ROUND_TRIP_SECONDS: Final = 0.1
"""Between datacentres, rather more than less."""


class Borrowing:
    """Decides for one engine, on its thread; `post` hears of what has come, from any."""

    def __init__(
        self,
        runner: Runner,
        profiler: Profiler,
        traffic: Traffic,
        counters: TransferCounters,
        post: Callable[[Borrowed], None],
    ):
        self._runner = runner
        self._profiler = profiler
        self._traffic = traffic
        self._counters = counters
        self._post = post
        self.tokens = 0
        """Tokens that came."""

    def begins(self, sequence: Sequence) -> bool:
        """Tell whether a sequence that was just admitted borrows; it waits for `Borrowed`, or its offer's end, then."""
        offer = sequence.request.offer
        if offer is None or offer.is_decided:
            return False
        decision = decide_lending(self._facts(sequence, offer))
        log.debug("prefill %s borrows: %s, %s", offer.manifest.transfer_id, decision.borrow, decision.reason)
        offer.borrow(self._intake(sequence, offer) if decision.borrow else None)
        return decision.borrow

    def came(self, sequence: Sequence) -> Receipt | None:
        """Return what a sequence waited for, None if it does not wait any more."""
        offer = sequence.request.offer
        if sequence.phase is not Phase.FETCHING or offer is None or offer.borrowed is None:
            return None
        self.tokens += offer.borrowed.receipt.expected.tokens
        return offer.borrowed.receipt

    def _facts(self, sequence: Sequence, offer: Offer) -> LendingFacts:
        rates, peer = self._traffic.packer.rates, offer.prompt.peer
        return LendingFacts(
            prompt_tokens=len(sequence.token_ids),
            cached_tokens=sequence.computed_tokens,
            lend_tokens=offer.prompt.lend_tokens,
            profile=self._profiler.profile,
            link_mbps=rates.mbps(peer),
            round_trip_seconds=rates.round_trip_seconds(peer) or UNKNOWN_ROUND_TRIP_SECONDS,
        )

    def _intake(self, sequence: Sequence, offer: Offer) -> Intake:
        expected = msgspec.structs.replace(
            offer.manifest,
            start_token=sequence.computed_tokens,
            end_token=offer.prompt.lend_tokens,
            hidden_size=0,
        )
        handle = sequence.request.handle
        intake = Intake(
            Receipt(expected, DECODABLE, TO_GIVER, threading.Lock()),
            self._runner.place(sequence.held),
            self._counters.received,
            offer.silent_seconds,
            self._traffic.memory,
        )
        intake.on_whole = lambda: self._post(Borrowed(handle))
        return intake
