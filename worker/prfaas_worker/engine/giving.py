"""Cached prefixes for other instances: nothing is computed, a lease on what is cached is all that it takes.

It must not disturb those who compute here. So it takes a slot only where no running request was promised it, no page
that a decoding sequence may need next, and it waits for neither: whoever asks can compute, too.
"""

from prfaas.errors import CapacityError, InternalError
from prfaas.wire.engine import Failed, Granted, StartPrefix
from prfaas.wire.headers import CODE_OVERLOADED, CODE_PREFIX_NOT_FOUND
from prfaas.wire.prefill import PrefillGrant
from prfaas_worker.cache.blocks import Lease
from prfaas_worker.cache.cache import HybridCache
from prfaas_worker.engine.runner import Runner
from prfaas_worker.engine.schedule import Facts
from prfaas_worker.engine.sequences import Phase, Sequence
from prfaas_worker.transfer.layout import prefix_frames
from prfaas_worker.transfer.offers import Offer, Offers


class Giving:
    """Gives prefixes of one cache. Used from the engine's thread alone."""

    def __init__(self, cache: HybridCache, runner: Runner, offers: Offers):
        self._cache = cache
        self._runner = runner
        self._offers = offers

    def give(self, sequence: Sequence, facts: Facts[Sequence]) -> Granted | Failed:
        """Offer the longest prefix of a sequence's tokens that is cached, and say so; `facts` is what runs beside it.

        Where it is granted the sequence is delivering, and holds the prefix until its offer ends.
        """
        request = sequence.request
        message, handle = request.asked, request.handle
        if not isinstance(message, StartPrefix):
            raise InternalError(f"request {handle} asks for no prefix")
        tokens = self._cache.cached_tokens(sequence.chain.hashes, len(sequence.token_ids) - 1)
        if tokens <= (start_token := message.request.start_token):
            text = f"nothing longer than {start_token} tokens of this prompt is cached here"
            return Failed(handle, 404, CODE_PREFIX_NOT_FOUND, text)
        try:
            lease = self._lease(sequence, tokens, facts)
            offer, grant = self._granted(lease, message, tokens)
        except CapacityError as error:
            return Failed(handle, 503, CODE_OVERLOADED, str(error))
        sequence.lease, sequence.phase, request.offer = lease, Phase.DELIVERING, offer
        offer.computing()
        for frame in prefix_frames(offer.manifest, self._runner.place(lease)):
            offer.put(frame)
        offer.computed(0.0)
        return Granted(handle, grant)

    def _lease(self, sequence: Sequence, tokens: int, facts: Facts[Sequence]) -> Lease:
        lease = self._cache.open_prefix(sequence.chain.hashes, tokens) if facts.free_slots > 0 else None
        if lease is None:
            raise CapacityError("all sequences of this instance are in use: no prefix can be given now")
        if self._cache.free_pages < len(facts.running):
            self._cache.close(lease)
            raise CapacityError("the cache of this instance is in use: no prefix can be given now")
        return lease

    def _granted(self, lease: Lease, message: StartPrefix, tokens: int) -> tuple[Offer, PrefillGrant]:
        try:
            return self._offers.grant(message, tokens)
        except CapacityError:
            self._cache.close(lease)
            raise
