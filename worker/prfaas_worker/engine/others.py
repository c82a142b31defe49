"""What sequences have of other instances: two ways in which a prompt comes from them, in part or whole.

    a prefill elsewhere    the prompt's whole cache and its last hidden state
    a cached prefix        of any prompt that is computed here, before the rest is

And one in which they take a prefix of ours.

Whatever came stands in the sequence's own memory, and from then on it is as if it had been cached here.
"""

from collections.abc import Callable

from prfaas.errors import PrfaasError
from prfaas.wire.engine import Failed, Granted
from prfaas_worker.engine.events import Event, FetchEnded
from prfaas_worker.engine.gauges import Gauges
from prfaas_worker.engine.giving import Giving
from prfaas_worker.engine.memory import give_back, keep
from prfaas_worker.engine.parts import Parts
from prfaas_worker.engine.prefixes import Prefixes
from prfaas_worker.engine.schedule import Facts
from prfaas_worker.engine.sequences import Phase, Sequence
from prfaas_worker.transfer.fetch import Fetched


class Others:
    """Used from the engine's thread alone; `post` hears of what its threads have done."""

    def __init__(self, parts: Parts, post: Callable[[Event], None]):
        self._cache = parts.cache
        self._new_fetch = parts.new_fetch
        self._post = post
        self._prefixes = Prefixes(parts.cache)
        self._giving = Giving(parts.cache, parts.runner, parts.offers)

    def give(self, sequence: Sequence, facts: Facts[Sequence]) -> Granted | Failed:
        """Give a cached prefix to another instance; see Giving."""
        return self._giving.give(sequence, facts)

    def joins(self, sequence: Sequence) -> bool:
        """Tell whether a sequence that could be admitted waits for another's prefix instead, from now on."""
        return self._prefixes.joins(sequence)

    def begin(self, sequence: Sequence) -> None:
        """Start what brings a sequence more than is cached, if anything does.

        It was just admitted, and is FETCHING then until `came`.
        """
        if sequence.request.is_remote:
            self._fetch(sequence, is_prefix=False)
        elif self._prefixes.asks(sequence):
            self._fetch(sequence, is_prefix=True)

    def came(self, sequence: Sequence, result: Fetched | PrfaasError) -> Fetched | PrfaasError | None:
        """Go on after a fetch; returns what became of a whole prompt, which is for the caller to act upon."""
        if not self._prefixes.ended(sequence, result):
            return result
        if sequence.phase is Phase.ENDING:
            return None
        if isinstance(result, Fetched):
            sequence.request.prefix = result
            self._go_on(sequence, result.tokens, is_exact=result.is_exact)
        else:
            give_back(self._cache, sequence)  # its state may be half written
        return None

    def counted(self, gauges: Gauges) -> Gauges:
        """Return gauges with what was counted here."""
        return gauges._replace(
            prefixes=tuple(sorted(self._prefixes.outcomes.items())),
            prefix_tokens=self._prefixes.tokens,
        )

    def _fetch(self, sequence: Sequence, *, is_prefix: bool) -> None:
        sequence.phase = Phase.FETCHING
        handle = sequence.request.handle
        fetch = sequence.request.fetch = self._new_fetch(sequence, is_prefix)
        fetch.start(lambda result: self._post(FetchEnded(handle, result)))

    def _go_on(self, sequence: Sequence, tokens: int, *, is_exact: bool) -> None:
        """Compute from what came, and let others find it."""
        sequence.computed_tokens, sequence.phase, sequence.is_exact = tokens, Phase.RUNNING, is_exact
        sequence.cuts = (tokens, *(cut for cut in sequence.cuts if cut > tokens))
        sequence.request.cached_tokens = tokens
        keep(self._cache, sequence)
