"""Offers that grant themselves, for tests that have no mover: an engine grants, and its mover has the offers."""

from collections.abc import Callable

from prfaas.wire.engine import TransferSubject
from prfaas.wire.prefill import PrefillGrant
from prfaas_transfer.cache import CacheLayout
from prfaas_transfer.leases import Grants, Offer, Offers


class GrantedOffers(Offers):
    def __init__(
        self, layout: CacheLayout, data_port: int, capacity: int, on_end: Callable[[int], None] = lambda _handle: None
    ):
        super().__init__(layout, capacity, on_end)
        self._data_port, self._grants = data_port, Grants()

    def grant(self, subject: TransferSubject, start_token: int, end_token: int) -> tuple[Offer, PrefillGrant]:
        grant = self._grants.make(self._data_port, end_token)
        return self.open(subject, grant, start_token), grant
