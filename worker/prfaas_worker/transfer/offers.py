"""Prefills that this instance does for others, from the grant until they are delivered or given up.

An offer is a lease. Until its receiver connects it lives `LEASE_SECONDS`; from then on the connection is the lease:
when it breaks, the prefill is cancelled and its memory freed. Every way an offer ends passes through `end`, once. Its
frames view the cache's own pages, so `on_end` waits until no thread sends them any more.
"""

import hmac
import secrets
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from prfaas.errors import CapacityError, PeerError
from prfaas.wire.prefill import PrefillGrant, PrefillState, PrefillStatus
from prfaas.wire.transfer import Address, LayerGroup, Manifest
from prfaas_worker.transfer.counters import Outcome, TransferCounters
from prfaas_worker.transfer.mailbox import Failed, Finish, Mailbox

LEASE_SECONDS = 10


class Prompt(NamedTuple):
    """What the receiver asked for: the front's handle of the call, its id, the length and the first row it lacks."""

    handle: int
    request_id: str
    tokens: int
    start_token: int


class Offer:
    """One prefill for another instance. The engine's thread fills the mailbox, the connection's thread empties it."""

    def __init__(self, prompt: Prompt, manifest: Manifest, token: str):
        self.prompt = prompt
        self.manifest = manifest
        self.token = token
        self.mailbox = Mailbox()
        self.lease_ends = time.monotonic() + LEASE_SECONDS
        self.state: PrefillState = "waiting"
        self.connected = False
        self.compute_started = 0.0
        """Monotonic seconds, set with the state `computing`."""

    def computing(self) -> None:
        """Note that the first chunk starts now."""
        self.compute_started = time.monotonic()
        self.state = "computing"

    def computed(self, prefill_seconds: float) -> None:
        """Note that everything is in the mailbox."""
        self.state = "sending"
        self.mailbox.put(Finish(prefill_seconds))

    def fail(self, message: str) -> None:
        """Note that the prefill cannot be computed; its connection, or its lease, ends it."""
        self.mailbox.put(Failed(message))


class Offers:
    """All offers of this instance. `on_end(handle)` is called from any thread, once an offer, when it ended."""

    def __init__(self, layout: tuple[str, tuple[LayerGroup, ...], int], data_port: int, capacity: int):
        self._fingerprint, self._groups, self._hidden_size = layout
        self._data_port = data_port
        self._capacity = capacity
        self._lock = threading.Lock()
        self._offers: dict[str, Offer] = {}
        # A restarted instance does not repeat the epochs of its former life.
        self._epoch = secrets.randbits(48)
        self.counters = TransferCounters()
        self.on_end: Callable[[int], None] = lambda _handle: None

    def grant(self, prompt: Prompt) -> tuple[Offer, PrefillGrant]:
        """Open an offer.

        Raises:
            CapacityError: too many are open already.

        """
        token = secrets.token_urlsafe(24)
        with self._lock:
            if len(self._offers) >= self._capacity:
                raise CapacityError(
                    f"{self._capacity} prefills are queued or undelivered already; try another instance"
                )
            self._epoch += 1
            manifest = Manifest(
                fingerprint=self._fingerprint,
                transfer_id=secrets.token_hex(16),
                epoch=self._epoch,
                start_token=prompt.start_token,
                end_token=prompt.tokens,
                groups=self._groups,
                hidden_size=self._hidden_size,
            )
            offer = self._offers[manifest.transfer_id] = Offer(prompt, manifest, token)
        return offer, PrefillGrant(
            transfer_id=manifest.transfer_id,
            token=token,
            epoch=manifest.epoch,
            data_port=self._data_port,
            expires_seconds=LEASE_SECONDS,
        )

    def connect(self, address: Address, token: str) -> Offer:
        """Bind the connection that presented `token` to its offer.

        Raises:
            PeerError: no such offer, the wrong token or epoch, or it is connected already. One answer for the first
                three, so that a stranger learns nothing.

        """
        with self._lock:
            offer = self._offers.get(address.transfer_id)
            known = offer is not None and hmac.compare_digest(offer.token.encode(), token.encode())
            if offer is None or not known or offer.manifest.epoch != address.epoch:
                raise PeerError(
                    f"no prefill {address.transfer_id} with this token and epoch: ended, expired or foreign"
                )
            if offer.connected:
                raise PeerError(f"prefill {address.transfer_id} has a connection already")
            offer.connected = True
            return offer

    def end(self, offer: Offer, outcome: Outcome) -> None:
        """End an offer; only the first call counts."""
        with self._lock:
            if self._offers.pop(offer.manifest.transfer_id, None) is None:
                return
            connected = offer.connected
        self.counters.ended("send", outcome)
        if connected:
            offer.mailbox.put(Failed(f"the prefill was {outcome}"))  # its connection says when it is through
        else:
            self._release(offer)

    def disconnect(self, offer: Offer) -> None:
        """Note that the connection of an offer is through with its frames, however it ended."""
        self.end(offer, "failed")  # counts only where the delivery did not end it
        self._release(offer)

    def _release(self, offer: Offer) -> None:
        offer.mailbox.close()
        self.on_end(offer.prompt.handle)

    def cancel(self, transfer_id: str) -> None:
        """End an offer by its id, if it is still open."""
        with self._lock:
            offer = self._offers.get(transfer_id)
        if offer is not None:
            self.end(offer, "cancelled")

    def expire(self) -> None:
        """End offers whose receiver did not connect in time."""
        now = time.monotonic()
        with self._lock:
            late = [offer for offer in self._offers.values() if not offer.connected and offer.lease_ends < now]
        for offer in late:
            self.end(offer, "expired")

    def status(self, transfer_id: str) -> PrefillStatus | None:
        """Tell how far an open offer is."""
        with self._lock:
            offer = self._offers.get(transfer_id)
        if offer is None:
            return None
        return PrefillStatus(
            transfer_id=transfer_id,
            request_id=offer.prompt.request_id,
            state=offer.state,
            prompt_tokens=offer.prompt.tokens,
            connected=offer.connected,
        )
