"""The worker's side of the connector: hands computed blocks to the mover, and lands what the mover fetched.

Blocks of a source's request stay as they are until its offer is over: vLLM keeps them, so nothing is copied before a
connection can send it. On an accelerator a step's kernels still run when vLLM's Python is through with it, on a stream
of vLLM's own. The mover copies on another thread, whose stream waits for none, so it hears of blocks when they are
written. States are another matter. A state's block is taken again two steps later, so each is copied
when its step ends. A source whose blocks are taken away is revoked first, and from then on the mover gets nothing of
it: what a destination has by then is not whole, and not used.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from prfaas.errors import ConfigError, PeerError
from prfaas_transfer.mover.client import MoverClient
from prfaas_transfer.mover.messages import AnnounceCache, CopyPart, DeclineCache, EndedFetch, FetchCache, MoverOptions
from prfaas_vllm.layout import (
    VllmGroup,
    blocks_of_bytes,
    frame_tokens,
    read_blocks,
    read_slice,
    started_kernels,
    write_blocks,
    write_slice,
)
from prfaas_vllm.ranks import RankOf
from prfaas_vllm.scheduling import BlockIds, Fetching, LegParams, SourceStart, SourceStep, StepPlan
from prfaas_vllm.shares import AllRanks, complete
from prfaas_vllm.slices import RankSlice, slices_of

log = logging.getLogger("vllm.prfaas")

IDLE_SECONDS = 0.005
"""A step in which no model runs waits so long for a transfer's end, instead of taking a core."""


@dataclass
class _Source:
    """A request whose cache is offered, in slices: of the open offers by their keys."""

    start: SourceStart
    open: dict[str, RankSlice]
    began: float = field(default_factory=time.monotonic)
    block_ids: BlockIds = ()
    put_tokens: dict[int, int] = field(default_factory=dict)  # By group: tokens of which the mover knows.
    states: dict[tuple[int, int], bytes] = field(default_factory=dict)  # By group and layer, copied.
    is_finished: bool = False
    copies: int = 0  # Those that run now, and need the blocks as they are.


@dataclass
class _Fetch:
    """A request whose cache comes, in slices; `reason` is why it will not be whole."""

    fetching: Fetching
    open: dict[str, RankSlice]
    reason: str = ""


class Transfers:
    """All transfers of one rank. vLLM's worker calls from one thread, the mover's client from another."""

    def __init__(self, groups: Sequence[VllmGroup], options: MoverOptions, all_ranks: AllRanks):
        self._groups, self._all_ranks = groups, all_ranks
        self._device = next(iter(groups[0].tensors.values()))[0].device
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._copied = threading.Condition(self._lock)
        self._sources: dict[str, _Source] = {}  # By transfer.
        self._transfer_of: dict[str, str] = {}  # By request.
        self._offers: dict[str, _Source] = {}  # By key.
        self._fetching: dict[str, _Fetch] = {}  # By request.
        self._fetches: dict[str, _Fetch] = {}  # By key.
        self._ended_requests: set[str] = set()  # vLLM waits for the offers of these.
        self._sent: set[str] = set()
        self._received: set[str] = set()
        self._failed: set[str] = set()
        self._newly_failed: set[str] = set()
        self._own = RankOf(options.rank, options.ranks)
        self._completing: torch.Event | None = None  # After the last kernel that completes a cache.
        self._hand_overs: queue.SimpleQueue[tuple[torch.Event, Callable[[], None]]] = queue.SimpleQueue()
        threading.Thread(target=self._hand_over, name="hand-over", daemon=True).start()
        self.mover = MoverClient(options, self, self._end_offer, self._end_fetch)

    def begin(self, plan: StepPlan) -> None:
        """Before the model runs: complete the caches that have come; give nothing any more of requests that lose their
        blocks in this step."""
        for fetched in plan.fetched:
            if complete(self._groups, self._own, fetched, self._all_ranks):
                self._completing = started_kernels(self._device)
        for request_id, reason in plan.revoked.items():
            for key in self._revoke(request_id):
                self.mover.fail(key, reason)
        self._cancel(plan.in_vain)
        for start in plan.starts:
            self._announce(start)

    def fetch(self, plan: StepPlan) -> None:
        """Ask for the caches that this step's new destinations wait for; decline those that they have."""
        for declined in plan.declined:
            for message in self._declines(declined.request_id, declined.leg):
                self.mover.decline(message)
        for fetching in plan.fetches:
            try:
                parts = slices_of(self._groups, self._own, fetching.leg.ranks, is_source=False)
            except ConfigError as error:
                self._refuse(fetching.request_id, str(error))
                continue
            if not parts:  # other ranks fetch all of it
                with self._lock:
                    self._received.add(fetching.request_id)
                continue
            messages = [_fetch_message(fetching, part) for part in parts]
            found = _Fetch(fetching, {message.key: part for message, part in zip(messages, parts, strict=True)})
            with self._lock:
                self._fetching[fetching.request_id] = found
                self._fetches.update(dict.fromkeys(found.open, found))
            self._await_completed()
            for message in messages:
                self.mover.fetch(message)

    def _await_completed(self) -> None:
        """Wait until no cache is being completed. One whose request was aborted meanwhile has lost its blocks, and what
        comes for the next request is not written by the kernels' stream."""
        kernels, self._completing = self._completing, None
        if kernels is not None:
            kernels.synchronize()

    def end_step(self, plan: StepPlan) -> None:
        """After the model ran: hand on what it computed."""
        for step in plan.steps:
            with self._lock:
                source = self._sources.get(self._transfer_of.get(step.request_id, ""))
            if source is not None and not source.is_finished:
                self._put(source, step)

    def results(self, ended_requests: set[str], *, is_idle: bool) -> tuple[set[str], set[str], set[str]]:
        """Return requests whose caches were sent, were received, and were received in vain (these are received, too).

        `ended_requests` are over for vLLM, which keeps the blocks of sources until they are reported here."""
        self._cancel(ended_requests)
        with self._changed:
            self._ended_requests |= ended_requests & (self._transfer_of.keys() | self._sent)
            if is_idle and (self._fetching or self._sources) and not (self._received or self._sent):
                self._changed.wait(IDLE_SECONDS)
            sent = self._sent & self._ended_requests
            self._sent -= sent
            self._ended_requests -= sent
            received, self._received = self._received, set()
            failed, self._failed = self._failed, set()
        return sent, received, failed

    def take_failed(self) -> set[str]:
        """Return the requests whose fetch has failed here since the last call."""
        with self._lock:
            failed, self._newly_failed = self._newly_failed, set()
        return failed

    # The mover's client calls these.

    def load(self, key: str, part: CopyPart, room: memoryview) -> None:
        group = self._groups[part.group]
        with self._lock:
            source = self._offers.get(key)
            if source is None or not source.block_ids:
                raise PeerError("the request has lost its blocks")
            tensors, cuts = group.tensors[part.layer], source.open[key].cuts
            block_ids = source.block_ids[group.number]
            state = None if part.tokens else source.states[part.group, part.layer]
            source.copies += 1
        try:
            blocks = group.blocks_of(block_ids, part.start_token, part.tokens) if state is None else [0]
            if cuts:
                held = tensors if state is None else blocks_of_bytes(tensors, state)
                read_slice(held, blocks, room, cuts[part.group])
            elif state is None:
                read_blocks(tensors, blocks, room)
            else:
                room[:] = state
        finally:
            with self._copied:
                source.copies -= 1
                self._copied.notify_all()

    def land(self, key: str, part: CopyPart, received: memoryview) -> None:
        group = self._groups[part.group]
        with self._lock:
            fetch = self._fetches[key]
            fetching, cuts = fetch.fetching, fetch.open[key].cuts
        start_token = part.start_token if part.tokens else fetching.goal
        blocks = group.blocks_of(fetching.block_ids[group.number], start_token, part.tokens)
        # Block 0 is vLLM's null block: it stands for one that was taken back, or never given.
        if 0 in blocks:
            raise PeerError(f"rows from token {start_token} have no block here")
        if cuts:
            write_slice(group.tensors[part.layer], blocks, received, cuts[part.group])
        else:
            write_blocks(group.tensors[part.layer], blocks, received)

    def _revoke(self, request_id: str) -> list[str]:
        """Load nothing of a request any more; wait for a copy that runs, and for none of another request. Return its
        open offers."""
        with self._copied:
            source = self._sources.get(self._transfer_of.get(request_id, ""))
            if source is None:
                return []
            # `load` looks at this under the same lock, so no copy begins any more. Only one that runs is waited for.
            source.block_ids = ()
            source.states.clear()
            self._copied.wait_for(lambda: not source.copies)
            return list(source.open)

    def _announce(self, start: SourceStart) -> None:
        leg = start.leg
        common = (leg.transfer_id, leg.epoch, leg.token, start.request_id, start.goal, start.prompt)
        try:
            parts = slices_of(self._groups, self._own, leg.ranks, is_source=True)
        except ConfigError as error:
            log.warning("prfaas: the cache of %s is not offered: %s", start.request_id, error)
            parts = ()
        messages = [AnnounceCache(*common, part.wire) for part in parts]
        with self._lock:
            # A caller that names a transfer twice: one offer answers for it, and the second request holds no blocks.
            if leg.transfer_id in self._sources:
                log.warning("prfaas: transfer of %s has begun before, under another request", start.request_id)
                parts = ()
            # Without an offer the blocks of the request are free as soon as it ends.
            if not parts:
                self._sent.add(start.request_id)
                return
            source = _Source(start, {message.key: part for message, part in zip(messages, parts, strict=True)})
            self._sources[leg.transfer_id] = source
            self._offers.update(dict.fromkeys(source.open, source))
            self._transfer_of[start.request_id] = leg.transfer_id
        for message in messages:
            self.mover.announce(message)

    def _put(self, source: _Source, step: SourceStep) -> None:
        goal = source.start.goal
        with self._lock:
            source.block_ids = step.block_ids
            keys = list(source.open)
        parts: list[CopyPart] = []
        for number, group in enumerate(self._groups):
            if group.layout.kind == "attention":
                parts += self._new_rows(source, number, step.computed)
        if step.computed >= goal:
            source.is_finished = True
            states = self._copy_states(source, goal)
            if states is None:
                reason = f"no state at token {goal}: vLLM took its block between {step.before} and {step.computed}"
                for key in keys:
                    self.mover.fail(key, reason)
                return
            parts += states
        self._when_computed(lambda: self._tell_mover(source, parts, is_last=step.computed >= goal))

    def _tell_mover(self, source: _Source, parts: list[CopyPart], *, is_last: bool) -> None:
        with self._lock:
            offers = dict(source.open)
        for key, crossing in offers.items():
            self.mover.put(key, [part for part in parts if crossing.has(part.group, part.layer)])
            if is_last:
                self.mover.finish(key, time.monotonic() - source.began)

    def _when_computed(self, call: Callable[[], None]) -> None:
        """Call when the kernels that were started until now are done, one after another."""
        kernels = started_kernels(self._device)
        if kernels is None:
            call()
        else:
            self._hand_overs.put((kernels, call))

    def _hand_over(self) -> None:
        while True:
            kernels, call = self._hand_overs.get()
            kernels.synchronize()
            call()

    def _new_rows(self, source: _Source, number: int, computed: int) -> list[CopyPart]:
        """Return the parts of a group's blocks that were filled since the last step; of all layers, block by block."""
        layout, goal = self._groups[number].layout, source.start.goal
        first = source.put_tokens.get(number, 0)
        full = computed // layout.row_tokens * layout.row_tokens
        end = layout.rows_span(0, goal)[1] if computed >= goal else full
        step = frame_tokens(layout)
        source.put_tokens[number] = max(first, end)
        return [
            CopyPart(number, layer, start, min(step, end - start))
            for start in range(first, end, step)
            for layer in layout.layers
        ]

    def _copy_states(self, source: _Source, goal: int) -> list[CopyPart] | None:
        """Copy the states after `goal` tokens, where a step has ended. None if vLLM has taken a block of them back."""
        parts = []
        for number, group in enumerate(self._groups):
            if group.layout.kind != "linear":
                continue
            blocks = group.blocks_of(source.block_ids[group.number], goal, 0)
            if 0 in blocks:
                return None
            for layer, tensors in group.tensors.items():
                room = bytearray(group.layout.nbytes)
                read_blocks(tensors, blocks, memoryview(room))
                source.states[number, layer] = bytes(room)
                parts.append(CopyPart(number, layer))
        return parts

    def _cancel(self, request_ids: set[str]) -> None:
        with self._lock:
            keys = [key for key, fetch in self._fetches.items() if fetch.fetching.request_id in request_ids]
        for key in keys:
            self.mover.cancel_fetch(key)

    def _declines(self, request_id: str, leg: LegParams) -> list[DeclineCache]:
        try:
            parts = slices_of(self._groups, self._own, leg.ranks, is_source=False)
        except ConfigError:  # then nothing is offered
            return []
        common = (request_id, leg.transfer_id, leg.epoch, leg.token, leg.host)
        ranks = [self._own.rank if part.wire is None else part.wire.rank for part in parts]
        ports = [leg.port + part.peer_rank for part in parts]
        return [DeclineCache(*common, port, leg.cluster, rank) for port, rank in zip(ports, ranks, strict=True)]

    def _refuse(self, request_id: str, reason: str) -> None:
        log.warning("prfaas: %s is computed here, its cache did not come: %s", request_id, reason)
        with self._lock:
            self._received.add(request_id)
            self._failed.add(request_id)

    def _end_offer(self, key: str) -> None:
        with self._changed:
            source = self._offers.pop(key)
            del source.open[key]
            if source.open:
                return
            del self._sources[source.start.leg.transfer_id]
            del self._transfer_of[source.start.request_id]
            self._sent.add(source.start.request_id)
            self._changed.notify_all()

    def _end_fetch(self, ended: EndedFetch) -> None:
        """Note that a slice came, or that the cache will not be whole: then the other slices are in vain."""
        with self._changed:
            fetch = self._fetches.pop(ended.key)
            del fetch.open[ended.key]
            request_id, is_first = fetch.fetching.request_id, bool(ended.reason and not fetch.reason)
            fetch.reason = fetch.reason or ended.reason
            if is_first:
                self._newly_failed.add(request_id)
            if not fetch.open:
                del self._fetching[request_id]
                self._received.add(request_id)
                if fetch.reason:
                    self._failed.add(request_id)
            self._changed.notify_all()
        if is_first:
            log.warning("prfaas: %s is computed here, its cache did not come: %s", request_id, ended.reason)
            self._cancel({request_id})


def _fetch_message(fetching: Fetching, part: RankSlice) -> FetchCache:
    leg = fetching.leg
    return FetchCache(
        fetching.request_id,
        leg.transfer_id,
        leg.epoch,
        leg.token,
        leg.host,
        leg.port + part.peer_rank,
        leg.cluster,
        fetching.start,
        fetching.goal,
        fetching.prompt,
        part.wire,
    )


def device_kind(tensor: torch.Tensor) -> str:
    """Return what the bytes of a cache depend on beside its shape."""
    if tensor.device.type != "cpu":
        return tensor.device.type
    amx = " AMX" if torch.cpu._is_amx_tile_supported() else ""
    return f"cpu {torch.backends.cpu.get_cpu_capability()}{amx}"
