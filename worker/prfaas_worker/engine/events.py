"""What other threads put into the engine's inbox, beside the front's messages."""

from concurrent.futures import Future
from typing import Literal, NamedTuple

from prfaas.errors import PrfaasError
from prfaas.wire.engine import Cancel, Generate, ResetCache, SetRole, StartPrefill, StartPrefix
from prfaas_worker.engine.grammar import Compiled
from prfaas_worker.transfer.fetch import Fetched
from prfaas_worker.transfer.offers import Offer

Part = Literal["grammar", "cache", "prefix"]
"""What a request may have to wait for before it can be admitted."""


class Offered(NamedTuple):
    """A prefill was granted to another instance."""

    message: StartPrefill
    offer: Offer


class OfferEnded(NamedTuple):
    """It was delivered, cancelled, or expired, and nobody sends from its memory any more."""

    handle: int


class FetchEnded(NamedTuple):
    """A fetch thread is done, and writes to its memory no more."""

    handle: int
    result: Fetched | PrfaasError


class Prepared(NamedTuple):
    """A request need not wait for this part any longer; `grammar` is the outcome where that was the part."""

    handle: int
    part: Part
    grammar: Future[Compiled] | None = None


class End(NamedTuple):
    """Nobody is left to serve."""


Event = Generate | StartPrefix | Cancel | ResetCache | SetRole | Offered | OfferEnded | FetchEnded | Prepared | End
