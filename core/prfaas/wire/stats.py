"""An engine's figures for its front's metrics: the content of the cache, the links to peers, and emulated time."""

from typing import Final

import msgspec

LATE_BOUNDS: Final = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
"""Upper bounds of the counts of how late emulated steps end, as shares of their time."""


class CacheStats(msgspec.Struct, frozen=True, array_like=True):
    """The prefix cache: pages now, and counts since the engine's start.

    Requests hold `used_pages`. Only the prefix cache holds `cached_pages`, which are evicted on demand. Of
    `query_tokens` looked up, `hit_tokens` were found with a state; `stateless_tokens` more had attention rows but no
    state there.
    """

    page_bytes: int = 0
    total_pages: int = 0
    used_pages: int = 0
    cached_pages: int = 0
    query_tokens: int = 0
    hit_tokens: int = 0
    stateless_tokens: int = 0
    evicted_pages: int = 0


class LinkStats(msgspec.Struct, frozen=True, array_like=True):
    """All data connections to one peer cluster, "" where its name is not known: gauges now, counts since the start.

    Round trips are means over the connections (the least is of all of them), rates sums; None while there were no
    connections lately. `sent_bytes` were acknowledged. Seconds are summed over connections but for
    `backlogged_seconds`, in which at least one had data waiting and `backlogged_bytes` were sent.
    """

    peer: str
    connections: int = 0
    rtt_seconds: float | None = None
    min_rtt_seconds: float | None = None
    delivery_rate_bytes_per_second: int | None = None
    unsent_bytes: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0
    retransmits: int = 0
    busy_seconds: float = 0.0
    rwnd_limited_seconds: float = 0.0
    sndbuf_limited_seconds: float = 0.0
    backlogged_bytes: int = 0
    backlogged_seconds: float = 0.0


class Lateness(msgspec.Struct, frozen=True, array_like=True):
    """How late steps ended, as shares of their time: counts by LATE_BOUNDS, of those beyond, and the sum."""

    counts: tuple[int, ...] = (0,) * (len(LATE_BOUNDS) + 1)
    total: float = 0.0


class EmulationStats(msgspec.Struct, frozen=True, array_like=True):
    """How well an emulated engine keeps its time. Its steps follow `profile`, `stretch` times as long, and its cache
    has 1/`cache_scale` of the bytes.

    `prefills` are the steps with tokens of prompts, `decodes` the others. `cpu_seconds` are the engine's own. All cores
    of its machine together worked for `busy_seconds` and did not for `idle_seconds`. All count from its first step on.
    """

    profile: str
    cache_scale: int
    stretch: float
    prefills: Lateness = Lateness()
    decodes: Lateness = Lateness()
    cpu_seconds: float = 0.0
    busy_seconds: float = 0.0
    idle_seconds: float = 0.0
