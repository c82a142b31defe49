"""Prices and backlogs: what a prompt costs in each cluster, given what waits there.

A threshold divides prompts by length only. But a long prompt is cheap in the hub when its pool is idle, and a short
one worth sending when it is not. So a request is charged for the time until its cache is in the hub, and for the
requests that it delays:

    done = max(W + T(n) + state / B, (bits before it + its bits) / B)     in the hub W + T(n)
    cost = done + T(n) * Q

W is the work that waits for the instance, in Q requests. The cluster's caches lack n tokens. B is what the link
carries. T * Q is the shadow price of the instance's time. A second of it delays everybody who comes before the queue is
empty. In a stationary queue as many come during a stay as there were when it began. It keeps long prompts out of a
queue of short ones. It makes the choice good for all requests, not only for the next one. A price on the link besides
changed nothing in simulation: (bits before it) / B says the same.

W, Q and the bits are the gateway's own, of this very moment: its `Backlog`. Profiles and links come from the scheduler
once an interval. Prices that were moved by measured pressure instead, once a second, did worse than a good threshold.
Such prices send everything to one place until the next second.

A gateway knows its backlog without asking anybody. Each request that it places adds its estimated seconds of prefill to
an instance and its bits to a link. It removes both when the request's first token is there. In between there is no news
of it, so the rest has to be guessed, and there are two guesses. A virtual server that works through what it was given
forgets what takes longer than estimated. The sum of what has not answered yet still counts what is long computed and
only waits for the link. The smaller of the two is taken.

A promise of a first token needs more care: under overload what is forgotten adds up. It is forgotten where an instance
decodes besides, and where other gateways send requests, too. So there a first token that comes straight from who
computed it is news: what was placed behind it has all to be computed yet, since instances compute in order of arrival.
A whole answer is none, nor is one whose cache crossed a link: they come long after.
"""

import math
from collections.abc import Hashable, Sequence

import msgspec

from prfaas.names import HUB
from prfaas.routing.feedforward import PoolFacts
from prfaas.routing.links import LinkView
from prfaas.wire.control import Price
from prfaas.wire.profile import Profile


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """The work of one request for a prefill instance, and for its link to the hub; in the hub there is no link."""

    seconds: float
    link: str = ""
    bits: float = 0.0
    mbps: float = 0.0


class Backlog:
    """All instances and links that one gateway places requests on. Times are of any one monotonic clock."""

    def __init__(self) -> None:
        self._placed: dict[Hashable, tuple[str, Work, float]] = {}
        self._instances: dict[str, _Queue] = {}
        self._unanswered: dict[str, _Queue] = {}
        """The same work, which no guess makes less than what is behind the last answer."""
        self._links: dict[str, _Queue] = {}

    def __len__(self) -> int:
        return len(self._placed)

    def add(self, request: Hashable, instance: str, work: Work, now_seconds: float) -> None:
        """Place a request that is placed nowhere yet."""
        self._instances.setdefault(instance, _Queue()).add(work.seconds, now_seconds, 1.0)
        end = self._unanswered.setdefault(instance, _Queue()).add(work.seconds, now_seconds, 1.0)
        self._placed[request] = instance, work, end
        if work.link:
            self._links.setdefault(work.link, _Queue()).add(work.bits, now_seconds, work.mbps * 1e6)

    def remove(self, request: Hashable, computed_seconds: float | None = None) -> None:
        """Take a request away, if it is placed: its cache is where it should be, or it is over. `computed_seconds` is
        the present time if its instance has computed it just now."""
        if request not in self._placed:
            return
        instance, work, end = self._placed.pop(request)
        if self._instances[instance].remove(work.seconds):
            del self._instances[instance]
        if self._unanswered[instance].remove(work.seconds):
            del self._unanswered[instance]
        elif computed_seconds is not None:
            self._unanswered[instance].keep_behind(end, computed_seconds, 1.0)
        if work.link and self._links[work.link].remove(work.bits):
            del self._links[work.link]

    def waiting_seconds(self, instance: str, now_seconds: float) -> float:
        """Return how long a request that comes now waits for an instance."""
        queue = self._instances.get(instance)
        return queue.left(now_seconds, 1.0) if queue else 0.0

    def unanswered_seconds(self, instance: str, now_seconds: float) -> float:
        """Return the same for a promise: no less than what was placed behind the last one that it has computed."""
        queue = self._unanswered.get(instance)
        return queue.left(now_seconds, 1.0) if queue else 0.0

    def waiting_requests(self, instance: str) -> int:
        queue = self._instances.get(instance)
        return queue.count if queue else 0

    def waiting_bits(self, link: str, now_seconds: float, mbps: float) -> float:
        """Return the bits that cross a link of `mbps` before those of a request that comes now."""
        queue = self._links.get(link)
        return queue.left(now_seconds, mbps * 1e6) if queue else 0.0


class _Queue:
    """The work that waits for one server: an instance that computes a second a second, or a link that carries bits."""

    def __init__(self) -> None:
        self.count = 0
        self._sum = 0.0
        self._end = 0.0
        self._left = 0.0
        self._since_seconds = 0.0

    def left(self, now_seconds: float, speed: float) -> float:
        """Return the amount left, of which `speed` is done a second."""
        done = speed * (now_seconds - self._since_seconds)
        self._left, self._since_seconds = max(0.0, min(self._left - done, self._sum)), now_seconds
        return self._left

    def add(self, amount: float, now_seconds: float, speed: float) -> float:
        """Add an amount behind all others; return where it ends, by what was ever added."""
        self._left = self.left(now_seconds, speed) + amount
        self._sum += amount
        self._end += amount
        self.count += 1
        return self._end

    def remove(self, amount: float) -> bool:
        """Remove one amount; True when nothing is left."""
        self._sum -= amount
        self.count -= 1
        return self.count == 0

    def keep_behind(self, end: float, now_seconds: float, speed: float) -> None:
        """Let all be left that was added behind an amount which ended there and has been removed."""
        self._left = max(self.left(now_seconds, speed), min(self._end - end, self._sum))


NOTHING_WAITS = Backlog()
"""Of a gateway that has placed nothing; not to be added to."""


def prices_of(pools: Sequence[PoolFacts], links: Sequence[LinkView]) -> tuple[Price, ...]:
    """Return the price of the hub and of every cluster with a live link; empty when one side is not known."""
    local = _mean_profile(HUB, pools)
    away = tuple(
        Price(cluster=link.cluster, profile=profile, link_mbps=link.effective_mbps)
        for link in links
        if link.state == "Alive" and (profile := _mean_profile(link.cluster, pools)) is not None
    )
    return (Price(cluster=HUB, profile=local), *away) if local is not None and away else ()


def work_of(price: Price, lacking_tokens: int, crossing_tokens: int) -> Work:
    """Return what a request asks of an instance where `lacking_tokens` are cached nowhere, and of the link to the hub.

    Figures that make no sense, which come from other processes, ask for infinitely much.
    """
    of = price.profile
    seconds = _or_inf(of.fixed_seconds + lacking_tokens * (of.token_seconds + of.squared_seconds * lacking_tokens))
    if price.cluster == HUB:
        return Work(seconds=seconds)
    bits = _or_inf(8.0 * (of.state_bytes + of.token_bytes * crossing_tokens))
    return Work(seconds=seconds, link=price.cluster, bits=bits, mbps=price.link_mbps)


def own_work(profile: Profile | None, lacking_tokens: int) -> Work | None:
    """Return what a request asks of an instance by that one's own profile; None where it has none that makes sense.

    What it asks of a link is left out: without prices nobody knows what that carries.
    """
    if profile is None:
        return None
    work = work_of(Price(cluster=HUB, profile=profile), lacking_tokens, 0)
    return work if math.isfinite(work.seconds) else None


def cost_seconds(price: Price, work: Work, instance: str, backlog: Backlog, now_seconds: float) -> float:
    """Return what a request costs at an instance. Infinite where the work is, or the link carries nothing."""
    if work.seconds == math.inf or (work.link and not 0 < work.mbps < math.inf):
        return math.inf
    done = backlog.waiting_seconds(instance, now_seconds) + work.seconds
    if work.link:
        bits_per_second = work.mbps * 1e6
        before = backlog.waiting_bits(work.link, now_seconds, work.mbps)
        # Rows cross while the rest computes, states only after the last token.
        last = done + 8.0 * price.profile.state_bytes / bits_per_second
        done = max(last, (before + work.bits) / bits_per_second)
    return done + work.seconds * backlog.waiting_requests(instance)


def _mean_profile(cluster: str, pools: Sequence[PoolFacts]) -> Profile | None:
    """Return the mean profile of a cluster's instances; None without a measured one."""
    mine = [pool for pool in pools if pool.cluster == cluster and pool.ready_instances > 0 and pool.profile.samples > 0]
    instances = sum(pool.ready_instances for pool in mine)
    if instances < 1:
        return None

    def mean(field: str) -> float:
        return sum(pool.ready_instances * getattr(pool.profile, field) for pool in mine) / instances

    return Profile(
        state_bytes=round(mean("state_bytes")),
        token_bytes=round(mean("token_bytes")),
        fixed_seconds=mean("fixed_seconds"),
        token_seconds=mean("token_seconds"),
        squared_seconds=mean("squared_seconds"),
        samples=min(pool.profile.samples for pool in mine),
    )


def _or_inf(amount: float) -> float:
    return amount if math.isfinite(amount) and amount >= 0 else math.inf
