"""The two ends of a transfer as the benchmark drives them, over the worker's own transfer code: the one file to change
when that code does.

A source stands for a prefill instance: its caches are random bytes, and its prefill takes as long as it is told to. A
destination stands for a decode instance with memory of its own that was touched before, as a running instance's is.
"""

import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
import xxhash
from benchmarks.transfer.shapes import SHAPES

from prfaas.wire.engine import TransferSubject
from prfaas.wire.frames import Address
from prfaas.wire.prefill import LegParams, new_transfer
from prfaas.wire.receive_ledger import ReceiveLedger
from prfaas_transfer.cache import CacheLayout
from prfaas_transfer.compression import Packer
from prfaas_transfer.credentials import PeerCredentials
from prfaas_transfer.data_port import DataPort, listen
from prfaas_transfer.leases import Offer, Offers
from prfaas_transfer.limits import EgressBucket, MemoryBudget, Traffic
from prfaas_transfer.link_stats import LinkMonitor
from prfaas_transfer.pull import Connections, FetchContext, Pull, SourceAddress
from prfaas_transfer.receive import ReceiveState
from prfaas_transfer.tls import PeerAuth, TlsAuth
from prfaas_transfer.transfer_log import TransferCounters
from prfaas_worker.cache.memory import CacheMemory, bytes_of
from prfaas_worker.cache.transfer_frames import CachePlace, block_frames, layer_groups, state_frames
from prfaas_worker.cache_spec import CacheGeometry

MEMORY_LIMIT_MIB: int | None = 256
"""The setting that bounds what transfers hold beside the cache."""
HAS_TLS = True
"""Whether both ends obey `Plan.tls`."""
FINGERPRINT = "0" * 64
CHUNK_TOKENS = 2048
"""A prefill instance's step."""
PORT = 7100
SILENCE_SECONDS = 5.0


class Plan(NamedTuple):
    """What both ends are made for: a model's shape, tokens of a cache, how many of them at once, TLS files or none."""

    shape: str
    tokens: int
    copies: int = 1
    tls: str = ""


class Caches:
    """Memory with room for `copies` caches, each in a slot and pages of its own."""

    def __init__(self, plan: Plan):
        self.layers = SHAPES[plan.shape]
        geometry = CacheGeometry(self.layers)
        pages = geometry.pages_for(plan.tokens)
        count = pages * plan.copies
        self.memory = CacheMemory(geometry, num_pages=count, num_slots=plan.copies, max_context=plan.tokens)
        self.memory.pages.fill_(1)
        self.memory.slots.fill_(1)
        self.places = [
            CachePlace(self.memory, slot, range(slot * pages, (slot + 1) * pages)) for slot in range(plan.copies)
        ]

    def randomise(self) -> None:
        """Give it content that compresses no more than noise."""
        generator = torch.Generator().manual_seed(1)
        self.memory.pages.random_(0, 256, generator=generator)
        self.memory.slots.random_(0, 256, generator=generator)

    def digest(self, copy: int) -> str:
        """Digest of one cache's rows and states."""
        place, made = self.places[copy], xxhash.xxh3_64()
        for index in range(len(self.layers)):
            for rows in self.memory.rows(index).values():
                made.update(bytes_of(rows[place.pages.start : place.pages.stop].contiguous()))
            for state in self.memory.states(index).values():
                made.update(bytes_of(state[place.slot].contiguous()))
        return made.hexdigest()


def layout_of(caches: Caches) -> CacheLayout:
    """What both ends agree on."""
    return CacheLayout(FINGERPRINT, layer_groups(caches.layers))


class Source:
    """Gives one cache as often as it is asked to."""

    def __init__(self, host: str, plan: Plan):
        self.caches = Caches(plan)
        self.caches.randomise()
        self.prefill_ended = 0.0
        self._offers = Offers(capacity=1000)
        DataPort(listen(host, PORT), self._offers, traffic_of(plan, "source"))

    def offer(self, tokens: int, prefill_seconds: float) -> dict[str, Any]:
        """Begin a prefill that takes so long, and return its leg; without any time it is done on return."""
        leg = LegParams(role="source", **new_transfer())
        manifest = layout_of(self.caches).manifest(Address(leg.transfer_id, leg.epoch), 0, tokens)
        offer = self._offers.announce(TransferSubject(0, "bench"), manifest, leg.token)
        if prefill_seconds:
            threading.Thread(target=self._prefill, args=(offer, tokens, prefill_seconds), daemon=True).start()
        else:
            self._prefill(offer, tokens, 0.0)
        return msgspec.to_builtins(leg)

    def _prefill(self, offer: Offer, tokens: int, seconds: float) -> None:
        """Put rows in as the engine does: layer by layer of each chunk, states with the last one."""
        place, layers = self.caches.places[0], len(self.caches.layers)
        starts = range(0, tokens, CHUNK_TOKENS)
        due, step = time.monotonic(), seconds / (len(starts) * layers)
        for start in starts:
            end = min(start + CHUNK_TOKENS, tokens)
            for layer in range(layers):
                due += step
                time.sleep(max(0.0, due - time.monotonic()))
                for frame in block_frames(offer.manifest, place, layer, (start, end)):
                    offer.put(frame)
                if end == tokens:
                    for frame in state_frames(offer.manifest, place, layer):
                        offer.put(frame)
        self.prefill_ended = time.monotonic()
        offer.finish_computing(seconds)


class Destination:
    """Takes caches into its own."""

    def __init__(self, host: str, plan: Plan):
        self._plan = plan
        self._port = SourceAddress(host, PORT, "source" if plan.tls else "")
        self.caches = Caches(plan)
        traffic = traffic_of(plan, "destination")
        self._shared = FetchContext(layout_of(self.caches), Connections(traffic.auth), TransferCounters(), traffic)

    def take(self, source_leg: dict[str, Any], copy: int) -> int:
        """Take one cache, and return its bytes.

        Raises:
            PeerError: it did not arrive whole.

        """
        leg = msgspec.convert(source_leg, LegParams)
        manifest = self._shared.layout.manifest(Address(leg.transfer_id, leg.epoch), 0, self._plan.tokens)
        ledger = ReceiveLedger(manifest, guard=threading.Lock())
        _, connections, counters, traffic = self._shared
        silent_seconds = partial(connections.silent_seconds, self._port)
        state = ReceiveState(ledger, self.caches.places[copy], counters.count_received, silent_seconds, traffic.memory)
        Pull(self._shared, self._port, leg.token, state).run()
        ledger.require_whole()
        return ledger.received_bytes


def traffic_of(plan: Plan, cluster: str) -> Traffic:
    """Return what an instance's transfers share; no cap, and noise goes through no codec."""
    monitor = LinkMonitor()
    auth = TlsAuth(PeerCredentials(Path(plan.tls) / cluster)) if plan.tls else PeerAuth()
    limit_bytes = MEMORY_LIMIT_MIB << 20 if MEMORY_LIMIT_MIB else sys.maxsize
    return Traffic(monitor, EgressBucket(), MemoryBudget(limit_bytes), Packer("none", monitor), auth)
