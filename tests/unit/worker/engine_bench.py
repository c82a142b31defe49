"""An engine that tests step by hand, on the real model or one that computes nothing, without sockets."""

import itertools
import queue
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from prfaas.schedule import slots_for
from prfaas.wire.engine import Generate, GiveCache, Sampling, ToFront, Tokens, TransferSubject
from prfaas.wire.frames import Address
from prfaas.wire.prefill import LegParams
from prfaas.wire.transfer import Done, Manifest
from prfaas_transfer.cache import CacheLayout
from prfaas_transfer.leases import Offer, Offers
from prfaas_transfer.limits import unlimited
from prfaas_transfer.mover.messages import Fetched
from prfaas_worker.cache.cache import HybridCache
from prfaas_worker.cache.memory import CacheMemory
from prfaas_worker.cache.transfer_frames import layer_groups
from prfaas_worker.cache_spec import CacheGeometry
from prfaas_worker.engine.loop import EngineLoop
from prfaas_worker.engine.profiler import Profiler
from prfaas_worker.engine.remote import RemoteCaches, received_origins
from prfaas_worker.engine.runner import Runner
from prfaas_worker.engine.sequences import Event, OfferEnded, PrefillOffered, Sequence, goal_of
from prfaas_worker.models.base import Batch, Chunk, Model
from prfaas_worker.models.solo import Solo

NAMED: dict[str, Any] = {"transfer_id": "a" * 32, "epoch": 7, "token": "secret"}
GREEDY = Sampling(0.0, 1.0, 0, 0)
TRAFFIC = unlimited()


class Parrot:
    """A model that computes nothing: it says token after token by chance."""

    def __init__(self, model: Model):
        self.layers, self.fingerprint, self.device = model.layers, model.fingerprint, model.device
        self.eos_token_ids, self.vocab_size = frozenset({1}), 264
        self.chance = torch.Generator().manual_seed(2)

    def bind(self, memory: CacheMemory) -> None:
        pass

    def forward(self, batch: Batch, _on_layer: Any = None) -> torch.Tensor:
        return torch.rand(batch.outputs, 264, generator=self.chance)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden


class FetchByHand:
    """A fetch whose end the test decides."""

    def __init__(self, sequence: Sequence):
        self.sequence = sequence
        self.cancelled = False

    def start(self, on_end: Any) -> None:
        self.on_end = on_end

    def cancel(self) -> None:
        self.cancelled = True


class OfferInReach(Offer):
    """An offer that an engine can end without a mover."""

    offers: Offers

    def cancel(self) -> None:
        self.offers.end(self, "cancelled")


class OffersInReach(Offers):
    """The offers of an engine without a mover."""

    def announce(self, subject: TransferSubject, manifest: Manifest, token: str) -> OfferInReach:
        offer = self._add(OfferInReach(subject, manifest, token))
        offer.offers = self
        return offer


class Bench:
    """An engine that is stepped by hand."""

    def __init__(
        self,
        model: Model,
        max_running: int = 8,
        max_waiting: int = 3,
        num_pages: int = 256,
        *,
        slots: int = 0,
        knows_peers: bool = True,
    ):
        self.sent: list[ToFront] = []
        self.fetches: list[FetchByHand] = []
        self.declined: list[tuple[int, str]] = []
        self.awaited: list[Callable[[], None]] | None = None
        """With a list sources begin when the test says so; without one at once."""
        self.memory = CacheMemory(
            CacheGeometry(model.layers),
            num_pages=num_pages,
            num_slots=slots or slots_for(max_running),
            max_context=num_pages * 64,
        )
        self.layout = CacheLayout("f" * 64, layer_groups(model.layers))
        inbox: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.offers = OffersInReach(max_running + max_waiting, lambda handle: inbox.put(OfferEnded(handle)))
        runner, cache = Runner(model, self.memory), HybridCache(self.memory)
        fetcher: Any = self
        self.engine = EngineLoop(
            inbox=inbox,
            runner=runner,
            cache=cache,
            kv_events=[],
            publish=lambda _batch: None,
            remote=RemoteCaches(runner, cache, fetcher, inbox.put, partial(received_origins, "hub", knows_peers)),
            profiler=Profiler(1, 1, lambda _profile: None),
            send=self.sent.extend,
            role="mixed",
            max_running=max_running,
            max_waiting=max_waiting,
        )
        self._handles = itertools.count(1)

    def prepare(self, sequence: Sequence) -> Any:
        self.fetches.append(FetchByHand(sequence))
        return self.fetches[-1]

    def await_source(self, _message: Generate, _leg: LegParams, on_begin: Callable[[], None]) -> None:
        if self.awaited is None:
            on_begin()
        else:
            self.awaited.append(on_begin)

    def decline(self, message: Generate | GiveCache, leg: LegParams) -> None:
        self.declined.append((message.handle, leg.transfer_id))

    def ask(self, prompt: bytes | list[int], **fields: Any) -> int:
        handle = next(self._handles)
        known = {"choices": 1, "max_tokens": 6, "sampling": GREEDY, "logprobs": -1}
        self.engine.inbox.put(Generate(handle=handle, request_id="r", token_ids=list(prompt), **(known | fields)))
        return handle

    def give(
        self, prompt: bytes, handle: int = 500, places: tuple[str, ...] | None = None, caller: str = "", **leg: Any
    ) -> OfferInReach:
        """Have the engine give the cache of a prompt to a destination."""
        named = LegParams(role="source", **NAMED | leg)
        message = GiveCache(handle, "r", list(prompt), named, places=places, caller=caller)
        goal = goal_of(prompt, message.leg)
        manifest = self.layout.manifest(Address(message.leg.transfer_id, 7), 0, goal)
        offer = self.offers.announce(TransferSubject(handle, "r"), manifest, "secret")
        self.engine.inbox.put(PrefillOffered(message, offer))
        return offer

    def step(self) -> bool:
        busy = self.engine.step(wait=False)
        self.engine.cache.check_integrity()
        return busy

    def run(self) -> None:
        while self.step():
            pass

    def tokens(self, handle: int, choice: int = 0) -> list[int]:
        mine = [m for m in self.sent if isinstance(m, Tokens) and (m.handle, m.choice) == (handle, choice)]
        return [token for message in mine for token in message.token_ids]

    def ends(self, handle: int) -> list[str]:
        return [m.finish_reason for m in self.sent if isinstance(m, Tokens) and m.handle == handle and m.finish_reason]

    def assert_nothing_is_held(self) -> None:
        """Every slot is free, and every page free or only cached."""
        cache = self.engine.cache
        assert cache.free_slots == self.memory.num_slots
        assert cache.free_pages == self.memory.num_pages
        assert cache.stats().used_pages == 0


def generate(model: Model, prompt: bytes, count: int) -> list[int]:
    """Greedy tokens straight from the model: one prefill, one step a token."""
    bound = model._memory if hasattr(model, "_memory") else None
    solo = Solo(model, slots=1, tokens=len(prompt) + count)
    sequence = solo.new()
    with torch.inference_mode():
        logits = model.logits(solo.prefill(torch.tensor(list(prompt)), sequence))
        tokens = [int(logits.argmax())]
        while len(tokens) < count:
            tokens.append(int(solo.decode(torch.tensor(tokens[-1:]), [sequence])[0].argmax()))
    if bound is not None:
        model.bind(bound)
    return tokens


def prefix_fetched(
    model: Model, sequence: Sequence, tokens: int, *, is_exact: bool = True, origins: tuple[str, ...] | None = ()
) -> Fetched:
    """What the fetch of a cached prefix would bring: the first tokens prefilled into the sequence's memory."""
    start, lease = sequence.computed_tokens, sequence.held
    if lease.has_slot:
        chunk = torch.tensor(sequence.token_ids[start:tokens])
        with torch.inference_mode():
            model.forward(Batch(chunk, (Chunk(lease.slot, start, len(chunk)),)))
    elif hasattr(model, "_memory"):  # what says tokens by chance has none
        _land(model, sequence, tokens)
    return Fetched(tokens, Done(frames=1, payload_bytes=7, digest="", origins=origins), 7, 0.25, is_exact)


def _land(model: Model, sequence: Sequence, tokens: int) -> None:
    """Prefill the first tokens of a sequence without a slot elsewhere, and copy them into its pages."""
    bound, lease, span = model._memory, sequence.held, (sequence.computed_tokens, tokens)
    solo = Solo(model, slots=1, tokens=tokens)
    computed = solo.new()
    with torch.inference_mode():
        solo.prefill(torch.tensor(sequence.token_ids[:tokens]), computed)
    model.bind(bound)
    pages = solo.pages(computed).tolist()
    for layer, spec in enumerate(model.layers):
        for name in (tensor.name for tensor in spec.rows):
            _copy(solo.memory.row_bytes(layer, name, pages, span), bound.row_bytes(layer, name, lease.pages, span))
        for name in (tensor.name for tensor in spec.state):
            state = [solo.memory.state_bytes(layer, name, computed.slot)]
            _copy(state, bound.paged_state_bytes(layer, name, lease.state_pages))


def _copy(source: list[memoryview], target: list[memoryview]) -> None:
    left = memoryview(b"".join(source))
    for piece in target:
        piece[:], left = left[: len(piece)], left[len(piece) :]
    assert not left
