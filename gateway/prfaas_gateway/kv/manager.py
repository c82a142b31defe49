"""Follows the caches of all instances in the routing table, and finds each request's cached prefixes.

Engines with our mover are followed at its port, the others over ZMQ. Our workers' events map their blocks to prompts.
vLLM and SGLang report blocks of tokens, which match prompts of token ids only. vLLM gives the token ids of long texts
(`tokenizer`). For other texts, for instances without events, and where events were lost, the gateway matches the
prompts that it sent before. These expire after a while, and at once when an instance loses its cache. An instance's
part of the index is forgotten when the instance leaves the table, changes its address, or restarts. It stays while the
instance is unreachable, since ejections keep requests away.

A data-parallel rank of an engine has its own cache. So each rank is followed and matched as an instance would be.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any, Final, Literal, NamedTuple

import msgspec

from prfaas.errors import UNREADABLE, PrfaasError
from prfaas.kvindex.byte_maps import SentPrompts
from prfaas.kvindex.bytes import ByteChain, TokenChain
from prfaas.kvindex.canonical import TOKEN_BYTES, Canonical
from prfaas.kvindex.index import InstanceIndex, PrefixIndex
from prfaas.routing.facts import Route
from prfaas.util import Backoff, backoff_seconds
from prfaas.wire.profile import PATH as PROFILE_PATH
from prfaas.wire.profile import Profile, read_profile
from prfaas.wire.routes import Instance, RoutingTable, rank_name, takes_rank
from prfaas_gateway.kv.cache_events import EventStream, NoStreamError
from prfaas_gateway.kv.foreign_events import ForeignEventStream
from prfaas_gateway.kv.mover_events import MoverEventStream
from prfaas_gateway.kv.tokenizer import EngineTokenizer, PromptTokens, may_tokenize
from prfaas_gateway.metrics import GatewayMetrics
from prfaas_gateway.request import GatewayRequest, PromptFacts, read_aside
from prfaas_gateway.state import GatewayState
from prfaas_gateway.upstream import Upstream

log = logging.getLogger(__name__)

FIRST_PAUSE_SECONDS: Final = 0.25
MAX_PAUSE_SECONDS: Final = 30.0
SILENT_PAUSE_SECONDS: Final = 60.0
PROFILE_SECONDS: Final = 60.0
PROFILE_BYTES: Final = 64 << 10
TURN_SECONDS: Final = 0.002
# So events take a quarter of the event loop at most, and a turn holds up a relayed piece for a few milliseconds.
REST_FACTOR: Final = 3
POLL_SECONDS: Final = 0.25
MAX_BODY_BYTES: Final = 4 << 20
"""About a million tokens. Larger bodies are not matched: hashing would delay other requests."""
MAX_TOKEN_BLOCKS: Final = 1 << 14
"""The most blocks of a prompt of token ids to match: a million tokens in blocks of 64."""
SOME_BLOCKS: Final = 2000
"""To hash more of them takes longer than a millisecond or two."""
_value = msgspec.json.Decoder()
StreamState = Literal["followed", "silent", "lost"]


class InstancePart(NamedTuple):
    """One data-parallel rank of an instance."""

    instance: Instance
    rank: int

    @property
    def name(self) -> str:
        """Its name in the index: the instance's own for the first rank."""
        return rank_name(self.instance.name, self.rank) if self.rank else self.instance.name


class KvManager:
    """Follows all instances and matches prompts."""

    def __init__(self, state: GatewayState, upstream: Upstream, metrics: GatewayMetrics, index_blocks: int):
        self.index = PrefixIndex(index_blocks, index_blocks)
        self._metrics = metrics.kv
        self._state = state
        self._upstream = upstream
        self._table: RoutingTable | None = None
        self._tokenizer = EngineTokenizer(upstream, self._metrics.tokenized)
        self._duty_cycle = DutyCycle()
        self._followers: dict[str, tuple[Follower, asyncio.Task[None]]] = {}
        self._sent: dict[str, SentPrompts] = {}
        self._profiles: dict[str, Profile] = {}
        self._metrics.blocks.set_function(lambda: self.index.blocks)
        self._metrics.byte_blocks.set_function(lambda: self.index.pairs)
        self._metrics.refused_blocks.set_function(lambda: self.index.refused_blocks)
        for one in ("followed", "silent", "lost"):
            self._metrics.instances.labels(one).set_function(lambda one=one: self._count(one))

    async def run(self) -> None:
        """Follow for ever; cancelling ends all followers."""
        try:
            while True:
                self._keep_up()
                await asyncio.sleep(POLL_SECONDS)
        finally:
            self._tokenizer.close()
            for _, task in self._followers.values():
                task.cancel()
            await asyncio.gather(*(task for _, task in self._followers.values()), return_exceptions=True)

    async def find(self, request: GatewayRequest, values: Mapping[str, Any], prompt: PromptFacts) -> PromptFacts:
        """Return also where a prompt of these values is cached, its length where it is known, and the profiles."""
        prompt, table = prompt._replace(profiles=self._profiles), self._table
        # A single instance leaves no choice, and so does an empty index.
        if table is None or len(table.instances) < 2 or not (self._sent or self.index.pairs):
            return prompt
        if len(request.body) > MAX_BODY_BYTES:
            return prompt
        read = await read_aside(request, partial(_read_prompt, request, values))
        if read is None:
            return prompt
        body, canonical = read
        chain, total_tokens, is_exact = ByteChain(canonical.root, canonical.data), prompt.total_tokens, False
        tokens = await self._tokens_of(request, canonical, body, chain)
        if tokens is not None:
            total_tokens, is_exact = tokens.total_tokens, tokens.share == 1
        found = self.index.match(chain, *_by_role(table))
        now_seconds = self._state.clock()
        by_tokens = await self._by_tokens(tokens.data, canonical.salt) if tokens is not None else {}
        for name, sent in self._sent.items():
            matched_tokens, is_all = by_tokens.get(name, (0, False))
            if not is_all:
                sent_bytes = sent.match(chain, now_seconds)
                matched_tokens = max(matched_tokens, total_tokens * sent_bytes // max(1, len(chain.data)))
            if matched_tokens:
                found[name] = max(matched_tokens, found.get(name, 0))
        # The last token of a prompt is always computed, whatever is cached. Beyond a length that is only estimated an
        # instance may have cached more, and this is where it has a state.
        if is_exact:
            found = {name: min(tokens, total_tokens - 1) for name, tokens in found.items()}
        divided = [one for one in table.instances if one.ranks > 1]
        on_ranks = {
            one.name: tuple(found.pop(InstancePart(one, rank).name, 0) for rank in range(one.ranks)) for one in divided
        }
        cached_on = found | {one.name: _cached_on(one, on_ranks[one.name]) for one in divided}
        prompt = prompt._replace(total_tokens=total_tokens, is_exact=is_exact)
        return prompt._replace(chain=chain, cached_on=cached_on, cached_on_ranks=on_ranks)

    async def _tokens_of(
        self, request: GatewayRequest, canonical: Canonical, body: dict[str, Any], chain: ByteChain
    ) -> PromptTokens | None:
        """Return a prompt's token ids for matching in foreign engines; None if they are unknown or match nothing."""
        # What the engine cuts has other tokens.
        if body.get("truncate_prompt_tokens") is not None:
            return None
        followed = [
            follower.instance
            for name, (follower, _) in self._followers.items()
            if not follower.instance.record.maps_bytes and self.index[name].bytes
        ]
        if not followed:
            return None
        if canonical.texts is None:
            return PromptTokens(canonical.data)
        able = {one.name: one for one in followed if may_tokenize(one) and not self._state.is_ejected(one.name)}
        by_load = sorted(able.values(), key=lambda one: self._state.load(one.name))
        return await self._tokenizer.tokens_of(request, body, chain, by_load)

    async def _by_tokens(self, token_data: bytes, salt: str) -> dict[str, tuple[int, bool]]:
        """Return the matches of token ids under a salt in foreign engines, and whether they are complete. The blocks of
        long prompts are hashed in a thread, so that no stream must wait."""
        sizes = {TOKEN_BYTES * index.block_tokens for _, index in self._followed_by_tokens()}
        chains = {size: TokenChain(salt, token_data[: MAX_TOKEN_BLOCKS * size], size) for size in sizes}
        for chain in chains.values():
            if len(chain) > SOME_BLOCKS:
                await asyncio.to_thread(chain.all)
        matches: dict[str, tuple[int, bool]] = {}
        for follower, index in self._followed_by_tokens():
            chain = chains.get(TOKEN_BYTES * index.block_tokens)
            if chain is None:  # it came meanwhile, or told its first blocks
                continue
            # Under a salt an engine that names none has told nothing.
            is_told = follower.stream.is_whole and (not salt or follower.instance.record.names_salts)
            matches[follower.part.name] = index.match_tokens(chain), is_told
        return matches

    def _followed_by_tokens(self) -> Iterator[tuple["Follower", InstanceIndex]]:
        """Yield the followers of foreign engines that are followed now, and what these have told."""
        for name, (follower, _) in self._followers.items():
            if not follower.instance.record.maps_bytes and follower.state == "followed":
                yield follower, self.index[name]

    def note_placed(self, prompt: PromptFacts, route: Route, ranks: Mapping[str, int]) -> None:
        """Record where a prompt is cached from now on; `ranks` are the chosen ones of the route's instances."""
        prefiller = route.prefill or route.decode
        self._metrics.matched_tokens.inc(prompt.cached_on.get(prefiller.name, 0))
        if route.prefix is not None:
            self._metrics.prefixes.inc()
        if prompt.chain is not None:
            parts = {InstancePart(one, ranks.get(one.name, 0)).name for one in (prefiller, route.decode)}
            for name in parts & self._sent.keys():
                self._sent[name].add(prompt.chain, self._state.clock())

    def _keep_up(self) -> None:
        """Follow exactly the instances of the table."""
        table = self._state.table
        if table is None or table is self._table:
            return
        self._table = table
        parts = {part.name: part for one in table.instances for part in _parts(one)}
        shrunk = self.index.set_instances(parts)
        for name, (follower, _) in list(self._followers.items()):
            known = parts.get(name)
            # The tree is beyond its new share, and only the instance could say which blocks to give up: it is asked.
            if known is None or not _is_same(known, follower.part) or name in shrunk:
                self._drop(name)
        for name, part in parts.items():
            if name not in self._followers:
                self._begin(part)

    def _begin(self, part: InstancePart) -> None:
        index = self.index[part.name]
        index.clear()
        if part.instance.record.events == "Mover":
            stream = MoverEventStream(part.instance, part.rank, index, self._upstream)
        else:
            stream = ForeignEventStream(part.instance, index, part.rank)
        if not part.instance.record.maps_bytes:
            self._sent[part.name] = SentPrompts(self._state.clock())
        follower = Follower(part, stream, self._upstream, self._duty_cycle, self._apply_news)
        self._followers[part.name] = follower, asyncio.create_task(follower.run())

    def _drop(self, name: str) -> None:
        _, task = self._followers.pop(name)
        task.cancel()
        self._sent.pop(name, None)
        self._profiles.pop(name, None)

    def _apply_news(self, follower: "Follower") -> None:
        """Apply a follower's news to sent prompts and the index."""
        name, stream = follower.part.name, follower.stream
        # A dropped follower, cancelled and not yet ended, would bring back what was forgotten.
        if follower is not self._followers.get(name, (None,))[0]:
            return
        counters = (self._metrics.batches, self._metrics.snapshots, self._metrics.gaps)
        for counter, old, new in zip(counters, follower.counted, stream.tally, strict=True):
            counter.inc(new - old)
        follower.counted = stream.tally
        if not follower.instance.record.maps_bytes:
            if follower.cache_losses != stream.cache_losses:
                follower.cache_losses = stream.cache_losses
                self._sent[name] = SentPrompts(self._state.clock())
        elif follower.state == "silent" or not stream.is_whole:
            self._sent.setdefault(name, SentPrompts(self._state.clock()))
        elif follower.state == "followed":
            self._sent.pop(name, None)
        if follower.profile is not None:
            self._profiles[name] = follower.profile

    def _count(self, state: str) -> int:
        return sum(follower.state == state for follower, _ in self._followers.values())


def _read_prompt(request: GatewayRequest, values: Mapping[str, Any]) -> tuple[dict[str, Any], Canonical] | None:
    """Return the values that canonical bytes depend on, token ids too, and these bytes; None for an invalid body."""
    try:
        body = {name: _value.decode(one) if isinstance(one, msgspec.Raw) else one for name, one in values.items()}
        body["model"] = request.model
        canonical = request.api.canonical(body)
    except (*UNREADABLE, ValueError):  # the latter for numbers of thousands of digits
        return None
    return None if canonical is None else (body, canonical)


def _parts(instance: Instance) -> list[InstancePart]:
    return [InstancePart(instance, rank) for rank in range(instance.ranks)]


def _is_same(known: InstancePart, followed: InstancePart) -> bool:
    """Return whether a part of a new table publishes at the same place as before."""
    one, other = known.instance, followed.instance
    places = [(each.url, each.data_port, each.rank_ports, each.engine, each.ranks) for each in (one, other)]
    return places[0] == places[1]


def _cached_on(instance: Instance, by_rank: Sequence[int]) -> int:
    """Return the match of an instance: that of its best rank, or where its engine chooses the rank, their mean."""
    return max(by_rank) if takes_rank(instance) else sum(by_rank) // len(by_rank)


def _by_role(table: RoutingTable) -> tuple[list[str], list[str]]:
    """Return the instances that get requests, and those that prefill for others."""
    names: tuple[list[str], list[str]] = ([], [])
    for one in table.instances:
        names[one.role == "prefill"].append(one.name)
    return names


class Follower:
    """Follows the event stream of one rank of an instance while the instance is in the routing table.

    A lost connection is made again after a back-off of up to half a minute. Without a stream, it is asked each minute.
    """

    def __init__(
        self,
        part: InstancePart,
        stream: EventStream,
        upstream: Upstream,
        duty_cycle: "DutyCycle",
        on_change: Callable[["Follower"], None],
    ):
        self.part = part
        self.instance = part.instance
        self.stream = stream
        self.state: StreamState = "lost"
        self.profile: Profile | None = None
        self.counted: tuple[int, int, int] = (0, 0, 0)
        """The part of the stream's tally that the metrics have."""
        self.cache_losses = 0
        """How often it was seen that a foreign instance lost its cache."""
        self._upstream = upstream
        self._duty_cycle = duty_cycle
        self._on_change = on_change
        self._profile_due_seconds = 0.0

    async def run(self) -> None:
        backoff = Backoff(FIRST_PAUSE_SECONDS, MAX_PAUSE_SECONDS)
        while True:
            pause_seconds = 0.0
            try:
                await self._follow()
                backoff.succeeded()
            except NoStreamError as error:
                pause_seconds = backoff_seconds(1, SILENT_PAUSE_SECONDS, SILENT_PAUSE_SECONDS)
                self._becomes("silent", str(error))
            except (PrfaasError, TimeoutError) as error:
                if self.state == "followed":
                    backoff.succeeded()
                self._becomes("lost", str(error))
            except Exception:  # a bug that one instance's data triggers must not end the gateway
                log.exception("internal error in the events of instance %s", self.part.name)
                self._becomes("lost", "a bug")
            await asyncio.sleep(pause_seconds or backoff.failed())

    async def _follow(self) -> None:
        async with aclosing(self.stream.portions()) as stream:
            async for portions in stream:
                await self._duty_cycle.take(portions)
                await self._read_profile()
                self._becomes("followed", "")

    async def _read_profile(self) -> None:
        """Read the instance's profile at intervals; prefixes are not fetched for an instance without one."""
        now_seconds = time.monotonic()
        if now_seconds < self._profile_due_seconds or not self.instance.record.has_profile:
            return
        self._profile_due_seconds = now_seconds + PROFILE_SECONDS
        try:
            async with asyncio.timeout(2), self._upstream.reading(self.instance, PROFILE_PATH) as answer:
                size = min(answer.content_length or 0, PROFILE_BYTES)
                profile = read_profile(await answer.content.readexactly(size), self.instance.url).profile
            self.profile = profile if profile.samples else None  # a profile without measurements would promise anything
        except (PrfaasError, TimeoutError) as error:
            log.debug("instance %s has no profile: %s", self.instance.name, error)

    def _becomes(self, state: StreamState, why: str) -> None:
        if state != self.state:
            log.info("instance %s: its cache is %s%s", self.part.name, state, f": {why}" if why else "")
        self.state = state
        self._on_change(self)


class DutyCycle:
    """Lets one follower at a time apply events, with rests three times as long as the work."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._worked_seconds = 0.0

    async def take(self, portions: Iterator[None]) -> None:
        """Run all portions with rests, so that the event loop stays free."""
        async with self._lock:
            began = time.perf_counter()
            for _ in portions:
                worked = self._worked_seconds + time.perf_counter() - began
                if worked >= TURN_SECONDS:
                    self._worked_seconds = 0.0
                    await asyncio.sleep(REST_FACTOR * worked)
                    began = time.perf_counter()
            self._worked_seconds += time.perf_counter() - began
