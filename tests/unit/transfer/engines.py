"""An engine that keeps its cache in a dictionary, and its mover."""

import queue
import secrets
import urllib.request
from functools import partial

import msgspec
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from prfaas_transfer.mover.client import MoverClient
from prfaas_transfer.mover.messages import (
    AnnounceCache,
    AwaitCache,
    CopyPart,
    DeclineCache,
    EndedFetch,
    FetchCache,
    MoverOptions,
)

from ...waiting import PATIENCE_SECONDS, take_next
from .layout import GROUPS, PAGE_TOKENS, TOKENS

SPANS = ((0, 16), (16, 32), (32, 44))


def make_options(**options: object) -> MoverOptions:
    defaults = {"host": "127.0.0.1", "data_port": 0, "fingerprint": "f", "groups": GROUPS, "slot_bytes": 4096}
    return MoverOptions(**defaults | options)  # type: ignore[arg-type]


def make_announcement() -> AnnounceCache:
    return AnnounceCache(secrets.token_hex(16), secrets.randbits(48), secrets.token_urlsafe(8), "request", TOKENS)


class Engine:
    """Memory by part, and a mover."""

    def __init__(self, **options: object):
        self.parts: dict[tuple[str, CopyPart], bytes] = {}
        self.landed: dict[tuple[str, CopyPart], bytes] = {}
        self.ended_offers: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.ended_fetches: queue.SimpleQueue[EndedFetch] = queue.SimpleQueue()
        self.options = make_options(**options)
        self.begun: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.mover = MoverClient(self.options, self, self.ended_offers.put, self.ended_fetches.put)

    @property
    def mover_pid(self) -> int:
        process = self.mover._process
        assert process is not None
        return process.pid

    def load(self, key: str, part: CopyPart, room: memoryview) -> None:
        group = GROUPS[part.group]
        if not part.tokens:
            room[:] = self.parts[key, part]
            return
        for token in range(part.start_token, part.start_token + part.tokens, PAGE_TOKENS):
            at = (token - part.start_token) // PAGE_TOKENS * group.nbytes
            room[at : at + group.nbytes] = self.parts[key, part._replace(start_token=token, tokens=PAGE_TOKENS)]

    def land(self, key: str, part: CopyPart, received: memoryview) -> None:
        if not part.tokens:
            self.landed[key, part] = bytes(received)
            return
        for at in range(part.tokens // PAGE_TOKENS):
            page = part._replace(start_token=part.start_token + at * PAGE_TOKENS, tokens=PAGE_TOKENS)
            self.landed[key, page] = bytes(received[at * 1000 : (at + 1) * 1000])

    def announce(self, **changes: object) -> AnnounceCache:
        message = msgspec.structs.replace(make_announcement(), **changes)
        self.mover.announce(message)
        return message

    def compute(self, message: AnnounceCache) -> None:
        for span in SPANS:
            for token in range(*span, PAGE_TOKENS):
                self.parts[message.key, CopyPart(1, 1, token, PAGE_TOKENS)] = secrets.token_bytes(1000)
            self.mover.put(message.key, [CopyPart(1, 1, span[0], span[1] - span[0])])
        for layer in (0, 2):
            self.parts[message.key, CopyPart(0, layer)] = secrets.token_bytes(GROUPS[0].nbytes)
        self.mover.put(message.key, [CopyPart(0, 0), CopyPart(0, 2)])
        self.mover.finish(message.key, 0.5)

    def offer(self, **changes: object) -> AnnounceCache:
        """Announce a cache and compute all of it."""
        message = self.announce(**changes)
        self.compute(message)
        return message

    def fetch(self, source: "Engine", message: AnnounceCache, **changes: object) -> None:
        fields = locate(source, message) | {"start_token": 0, "end_token": message.end_token, "slice": message.slice}
        self.mover.fetch(FetchCache(**(fields | changes)))  # type: ignore[arg-type]

    def await_begin(self, source: "Engine", message: AnnounceCache, **changes: object) -> None:
        awaited = AwaitCache(**(locate(source, message) | changes))  # type: ignore[arg-type]
        self.mover.await_begin(awaited, partial(self.begun.put, message.transfer_id))

    def decline(self, source: "Engine", message: AnnounceCache, **changes: object) -> None:
        self.mover.decline(DeclineCache(**(locate(source, message) | changes)))  # type: ignore[arg-type]

    def take_ended_fetch(self) -> EndedFetch:
        return take_next(self.ended_fetches, "a fetch ends")

    def take_begun(self) -> str:
        return take_next(self.begun, "a source begins")

    def take_ended_offer(self) -> str:
        return take_next(self.ended_offers, "an offer ends")


def locate(source: Engine, message: AnnounceCache) -> dict[str, object]:
    """Return what a destination says of an announced cache: which it is, and where."""
    names = ("request_id", "transfer_id", "epoch", "token")
    place = {"host": "127.0.0.1", "port": source.mover.data_port, "cluster": ""}
    return {name: getattr(message, name) for name in names} | place


def read_samples(port: int) -> list[Sample]:
    """Read the figures that a mover shows."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=PATIENCE_SECONDS) as answer:
        families = text_string_to_metric_families(answer.read().decode())
        return [sample for family in families for sample in family.samples]
