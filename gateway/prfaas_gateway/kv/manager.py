"""Who has what of a prompt: a follower for each instance of the routing table, and the question that each request asks.

Engines of others tell of blocks of tokens, which says something of prompts that come as token ids and nothing of text.
Of text, and of instances that tell nothing, this gateway goes by what it sent them: that is forgotten after a while,
and at once when an instance says that its cache is gone or begins anew. What is known of an instance is forgotten when
it leaves the table, changes its address, or begins anew; while it merely cannot be reached it stays, since ejections
keep requests away from it.
"""

import asyncio
from collections.abc import Mapping
from typing import Final, NamedTuple

import msgspec
from msgspec.structs import replace
from prometheus_client import CollectorRegistry

from prfaas.kvindex.byte_maps import Sent
from prfaas.kvindex.bytes import TOKEN_ROOT, ByteChain
from prfaas.kvindex.canonical import TOKEN_BYTES, Canonical, canonical_chat, canonical_completion
from prfaas.kvindex.index import PrefixIndex
from prfaas.routing.facts import Facts, Route, cached_by_cluster
from prfaas.wire.profile import Profile
from prfaas.wire.routes import Instance, RoutingTable
from prfaas_gateway.kv.follower import Follower, Turns
from prfaas_gateway.kv.http_stream import HttpStream
from prfaas_gateway.kv.metrics import KvMetrics
from prfaas_gateway.kv.published import Published
from prfaas_gateway.openai import UNREADABLE, Intake
from prfaas_gateway.state import GatewayState
from prfaas_gateway.upstream import Upstream

LOOK_SECONDS: Final = 0.25
LARGEST_BODY_BYTES: Final = 4 << 20
"""A million tokens. Of larger bodies nothing is asked: hashing them would hold up other requests."""
MOST_TOKEN_BLOCKS: Final = 1 << 14
"""Of a prompt of token ids, so many of an engine's blocks are looked at: a million tokens in blocks of 64."""


class Found(NamedTuple):
    """What is believed cached of one prompt, in tokens, and its chain of byte blocks, None where nothing was asked."""

    chain: ByteChain | None = None
    on: Mapping[str, int] = {}
    clusters: Mapping[str, int] = {}
    profiles: Mapping[str, Profile] = {}

    def added_to(self, facts: Facts) -> Facts:
        """Return the facts with what is cached."""
        return replace(facts, cached_tokens=self.clusters, cached_on=self.on or None, profiles=self.profiles)


NOTHING: Final = Found()


class KvManager:
    """Follows all instances, and answers for each prompt.

    Args:
        state: has the table.
        upstream: reaches the workers.
        registry: where metrics are told.

    """

    def __init__(self, state: GatewayState, upstream: Upstream, registry: CollectorRegistry):
        self.index = PrefixIndex()
        self.metrics = KvMetrics(registry)
        self._state = state
        self._upstream = upstream
        self._table: RoutingTable | None = None
        self._turns = Turns()
        self._followers: dict[str, tuple[Follower, asyncio.Task[None]]] = {}
        self._told: dict[str, tuple[int, int, int]] = {}
        self._sent: dict[str, Sent] = {}
        self._voids: dict[str, int] = {}
        self._profiles: dict[str, Profile] = {}
        self.metrics.show(lambda: self.index.blocks, lambda: self.index.pairs, lambda: self.index.refused_blocks)
        for one in ("followed", "silent", "lost"):
            self.metrics.instances.labels(one).set_function(lambda one=one: self._count(one))

    async def run(self) -> None:
        """Follow for ever; leaving ends all followers."""
        try:
            while True:
                self._keep_up()
                await asyncio.sleep(LOOK_SECONDS)
        finally:
            for _, task in self._followers.values():
                task.cancel()
            await asyncio.gather(*(task for _, task in self._followers.values()), return_exceptions=True)

    def find(self, intake: Intake, total_tokens: int) -> Found:
        """Return what is cached of a request's prompt where."""
        table, nothing = self._table, Found(profiles=self._profiles)
        # Between a single instance and itself there is no choice; where nothing is known there is none either.
        if table is None or len(table.instances) < 2 or not (self._sent or self.index.pairs):
            return nothing
        if len(intake.body) > LARGEST_BODY_BYTES:
            return nothing
        read = canonical_chat if intake.path.endswith("/chat/completions") else canonical_completion
        try:
            canonical = read(msgspec.json.decode(intake.body, type=dict))
        except UNREADABLE:
            return nothing
        if canonical is None:
            return nothing
        chain = ByteChain(canonical.root, canonical.data)
        taught, told = _by_role(table)
        found = self.index.match(chain, taught, told)
        now_seconds = self._state.clock()
        by_tokens = self._by_tokens(canonical)
        for name, sent in self._sent.items():
            matched_bytes, is_all = by_tokens.get(name, (0, False))
            if not is_all:
                matched_bytes = max(matched_bytes, sent.match(chain, now_seconds))
            if matched_bytes:
                found[name] = total_tokens * matched_bytes // len(chain.data)
        # Whatever is told, the last token of a prompt has to be computed.
        on = {name: min(tokens, total_tokens - 1) for name, tokens in found.items()}
        return Found(chain, on, cached_by_cluster(table, on), self._profiles)

    def _by_tokens(self, canonical: Canonical) -> dict[str, tuple[int, bool]]:
        """Return what engines of others say that they have of a prompt of token ids: bytes, and whether that is all."""
        if canonical.texts is not None or canonical.is_salted:
            return {}
        chains: dict[int, ByteChain] = {}
        told: dict[str, tuple[int, bool]] = {}
        for name, (follower, _) in self._followers.items():
            if isinstance(follower.stream, Published) and follower.state == "followed":
                size = TOKEN_BYTES * self.index[name].block_tokens
                data = canonical.data[: MOST_TOKEN_BLOCKS * size]
                chain = chains.setdefault(size, ByteChain(TOKEN_ROOT, data, size))
                told[name] = TOKEN_BYTES * self.index[name].match_tokens(chain), follower.stream.is_whole
        return told

    def placed(self, found: Found, route: Route) -> None:
        """Note where a prompt went and was taken."""
        prefiller = route.prefill or route.decode
        self.metrics.matched_tokens.inc(found.on.get(prefiller.name, 0))
        if route.prefix is not None:
            self.metrics.prefixes.inc()
        if found.chain is not None:
            for name in {prefiller.name, route.decode.name} & self._sent.keys():
                self._sent[name].add(found.chain, self._state.clock())

    def _keep_up(self) -> None:
        """Follow exactly the instances of the table."""
        table = self._state.table
        if table is None or table is self._table:
            return
        self._table = table
        instances = {one.name: one for one in table.instances}
        shrunk = self.index.set_instances(instances)
        for name, (follower, _) in list(self._followers.items()):
            known = instances.get(name)
            if known is None or known.url != follower.instance.url or name in shrunk:
                self._drop(name)
        for name, instance in instances.items():
            if name not in self._followers:
                self._begin(instance)

    def _begin(self, instance: Instance) -> None:
        index = self.index[instance.name]
        index.clear()
        if instance.engine == "prfaas":
            stream = HttpStream(instance, index, self._upstream)
        else:
            stream = Published(instance, index)
            self._sent[instance.name] = Sent(self._state.clock())
        follower = Follower(instance, stream, self._upstream, self._turns, self._heard)
        self._followers[instance.name] = follower, asyncio.create_task(follower.run())

    def _drop(self, name: str) -> None:
        _, task = self._followers.pop(name)
        task.cancel()
        for known in (self._told, self._sent, self._voids, self._profiles):
            known.pop(name, None)

    def _heard(self, follower: Follower) -> None:
        """Take in what a follower has come to know."""
        name, stream = follower.instance.name, follower.stream
        if follower is not self._followers.get(name, (None,))[0]:
            return
        before = self._told.get(name, (0, 0, 0))
        now = self._told[name] = stream.tally
        for counter, old, new in zip(
            (self.metrics.batches, self.metrics.snapshots, self.metrics.gaps), before, now, strict=True
        ):
            counter.inc(new - old)
        if isinstance(stream, Published):
            if self._voids.get(name, 0) != stream.voids:
                self._voids[name] = stream.voids
                self._sent[name] = Sent(self._state.clock())
        elif follower.state == "silent":
            self._sent.setdefault(name, Sent(self._state.clock()))
        elif follower.state == "followed":
            self._sent.pop(name, None)
        if follower.profile is not None:
            self._profiles[name] = follower.profile

    def _count(self, state: str) -> int:
        return sum(follower.state == state for follower, _ in self._followers.values())


def _by_role(table: RoutingTable) -> tuple[list[str], list[str]]:
    """Return the names of instances that requests are sent to, and of those that others ask for prefills."""
    names: tuple[list[str], list[str]] = ([], [])
    for one in table.instances:
        names[one.role == "prefill"].append(one.name)
    return names
