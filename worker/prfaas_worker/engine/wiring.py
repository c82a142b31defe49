"""Connects the parts of an engine around whatever computes: the cache's books, the step loop and the transfers.

It also says how much fits: the longest sequence, and the pages of a cache. Nothing here needs torch.
"""

import logging
import queue
from collections.abc import Callable, Mapping
from functools import partial
from typing import Final, NamedTuple

from prfaas.errors import ConfigError
from prfaas.schedule import Budgets
from prfaas.util import MIB
from prfaas.wire.engine import Role
from prfaas.wire.kvevents import KvEvent
from prfaas_transfer.cache import CacheLayout
from prfaas_worker.cache.cache import HybridCache
from prfaas_worker.cache.transfer_frames import layer_groups
from prfaas_worker.cache_spec import CacheGeometry
from prfaas_worker.engine.ipc import Outbox
from prfaas_worker.engine.loop import EngineLoop
from prfaas_worker.engine.profiler import Profiler
from prfaas_worker.engine.remote import EngineTransfers, Fetcher, RemoteCaches, received_origins
from prfaas_worker.engine.sequences import Event
from prfaas_worker.engine.steps import ModelFacts, StepRunner
from prfaas_worker.memory import available_bytes
from prfaas_worker.options import Options

log = logging.getLogger(__name__)

HOST_CACHE_MIB: Final = 1024
"""The default for a cache in the host's memory."""


class Calibration(NamedTuple):
    """What was measured before an engine serves: how long its steps should be, and what prefills cost."""

    budgets: Mapping[Role, Budgets]
    profiler: Profiler


def connect(
    runner: StepRunner,
    options: Options,
    outbox: Outbox,
    calibrate: Callable[[HybridCache], Calibration],
    pin: Callable[[memoryview], None] | None = None,
) -> tuple[EngineLoop, EngineTransfers]:
    """Return the step loop of a runner, and its transfers, which are to be started. `calibrate` may use the cache while
    nothing else does; `pin` is that of `EngineTransfers`."""
    model, kv_events = runner.model, list[KvEvent]()
    cache = HybridCache(runner.memory, on_event=kv_events.append, attention_kind=model.attention_kind)
    inbox: queue.SimpleQueue[Event] = queue.SimpleQueue()
    layout = CacheLayout(model.fingerprint, layer_groups(model.layers))
    transfers = EngineTransfers(layout, runner.memory, options, outbox.put, inbox.put, pin)
    budgets, profiler = calibrate(cache)
    log.info("a step computes up to %d tokens, %d of a prompt beside decodes", *budgets[options.role][:2])
    origins_of = partial(received_origins, options.cluster, bool(options.tls_dir))
    engine = EngineLoop(
        inbox=inbox,
        runner=runner,
        cache=cache,
        kv_events=kv_events,
        publish=partial(transfers.publish, "kv"),
        remote=RemoteCaches(runner, cache, Fetcher(runner, transfers), inbox.put, origins_of),
        profiler=profiler,
        send=outbox.put,
        role=options.role,
        max_running=options.max_running,
        max_waiting=options.max_waiting,
        budgets=budgets,
    )
    return engine, transfers


def max_context(model: ModelFacts, options: Options) -> int:
    """Return the most tokens of a sequence. Raises ConfigError if the options exceed the model's maximum."""
    wanted = options.max_context_tokens or model.max_context
    if wanted > model.max_context:
        raise ConfigError(
            f"--max-context {wanted} is more than the {model.max_context} tokens of this model: give at most those, or "
            "leave it out"
        )
    return wanted


def count_pages(
    geometry: CacheGeometry, options: Options, context: int, cache_mib: int, *, is_on_gpu: bool = False
) -> int:
    """Return the pages of a cache of this size, beside the states of sequences. Raises ConfigError if one sequence of
    the longest context does not fit with its state, or the host has less memory than the options say."""
    states = options.slots * geometry.slot_bytes
    num_pages = (cache_mib * MIB - states) // geometry.page_bytes
    # A cache that comes from another instance has its state in pages.
    if num_pages < (least := geometry.pages_for(context) + geometry.pages_per_state):
        raise ConfigError(_too_little(options, context, cache_mib, (states, least * geometry.page_bytes), is_on_gpu))
    if options.cache_mib and not is_on_gpu and cache_mib > (available := available_bytes() // MIB):
        raise ConfigError(
            f"--cache-mib {cache_mib} is more than the {available} MiB of memory that are available: give less"
        )
    log.info(
        "the cache has %d MiB: %d pages of %d tokens, and %d MiB for the states of %d sequences",
        cache_mib,
        num_pages,
        geometry.page_tokens,
        states // MIB,
        options.slots,
    )
    return num_pages


def _too_little(options: Options, context: int, cache_mib: int, needed: tuple[int, int], is_on_gpu: bool) -> str:
    """Return the refusal of a cache that has no room for these bytes of states, and of one sequence's cache."""
    states_mib, rows_mib, least_mib = (-(-nbytes // MIB) for nbytes in (*needed, sum(needed)))
    too_little = (
        f"too little for the states of {options.slots} sequences ({states_mib} MiB, --max-running) and one "
        f"sequence of {context} tokens that comes from another instance ({rows_mib} MiB, --max-context)"
    )
    smaller = "a smaller --max-context or --max-running"
    if options.cache_mib:
        return f"--cache-mib {cache_mib} is {too_little}: give --cache-mib {least_mib} or more, or {smaller}"
    if not is_on_gpu:
        return f"the cache's {cache_mib} MiB are {too_little}: give --cache-mib {least_mib} or more, or {smaller}"
    return (
        f"the weights leave {cache_mib} MiB of the GPU's memory for the cache, which is {too_little}: give {smaller}, "
        "or --device cpu"
    )
