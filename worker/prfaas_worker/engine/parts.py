"""What an engine is put together from."""

from collections.abc import Callable
from typing import NamedTuple

from prfaas.wire.engine import ToFront
from prfaas.wire.kvevents import KvEvent
from prfaas_worker.cache.cache import HybridCache
from prfaas_worker.engine.grammar import Grammars
from prfaas_worker.engine.profile import Profiler
from prfaas_worker.engine.runner import Runner
from prfaas_worker.engine.sequences import Sequence
from prfaas_worker.transfer.fetch import RemoteFetch
from prfaas_worker.transfer.offers import Offers
from prfaas_worker.transfer.traffic import Traffic


class Parts(NamedTuple):
    """One of each.

    `new_fetch(sequence, is_prefix)` prepares what brings a sequence's prompt, or a cached prefix of it, from another
    instance. `answer` queues messages to the front, in order.
    """

    runner: Runner
    cache: HybridCache
    events: list[KvEvent]
    """What the cache has to tell routers since the last step."""
    grammars: Grammars
    profiler: Profiler
    offers: Offers
    traffic: Traffic
    new_fetch: Callable[[Sequence, bool], RemoteFetch]
    answer: Callable[[list[ToFront]], None]
