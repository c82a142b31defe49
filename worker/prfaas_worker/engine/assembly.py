"""Builds an engine: the model's memory and cache, the step loop, and its transfers."""

import logging
import queue
from functools import partial
from pathlib import Path

import torch

from prfaas.errors import CapacityError, ConfigError
from prfaas.util import MIB
from prfaas.wire.engine import Role
from prfaas.wire.kvevents import KvEvent
from prfaas_transfer.cache import CacheLayout
from prfaas_worker.cache.cache import HybridCache
from prfaas_worker.cache.memory import CacheGeometry, CacheMemory
from prfaas_worker.cache.transfer_frames import Staging, layer_groups
from prfaas_worker.engine.ipc import Outbox, put_profile
from prfaas_worker.engine.loop import EngineLoop
from prfaas_worker.engine.profiler import Profiler, measure_steps
from prfaas_worker.engine.remote import EngineTransfers, Fetcher, RemoteCaches
from prfaas_worker.engine.runner import Runner, prefill_seconds, step_seconds, warm_up
from prfaas_worker.engine.schedule import Budgets, role_budgets, step_tokens
from prfaas_worker.engine.sequences import Event
from prfaas_worker.memory import available_bytes
from prfaas_worker.models import load_model
from prfaas_worker.models.base import Model
from prfaas_worker.options import Options

log = logging.getLogger(__name__)

CPU_CACHE_MIB = 1024
_STEPS_SHARE = 0.5  # Share of the time for measurements that is for the length of steps.


def load_and_assemble(options: Options, outbox: Outbox) -> tuple[Model, Path, EngineLoop, EngineTransfers]:
    """Load the model; return it, its tokenizer's directory, its step loop and its transfers, which are to be started.

    With `--device auto` the CPU runs a model whose weights fit the GPU and whose cache does not. Raises ConfigError if
    the options name what cannot be had.
    """
    model, directory = load_model(options.model_source, options.threads or None, options.device, options.dtype)
    try:
        return model, directory, *assemble(model, options, outbox)
    except (ConfigError, CapacityError) as error:
        if options.device != "auto" or model.device.type == "cpu":
            raise
        log.warning("the model runs on the CPU, not on the GPU: %s", error)
    del model  # its memory on the GPU is needed no more
    model, directory = load_model(options.model_source, options.threads or None, "cpu", options.dtype)
    return model, directory, *assemble(model, options, outbox)


def assemble(model: Model, options: Options, outbox: Outbox) -> tuple[EngineLoop, EngineTransfers]:
    """Return the step loop of a model and its transfers. Raises ConfigError if the requested cache cannot be had."""
    memory = _cache_memory(model, options)
    runner = Runner(model, memory, Staging(memory) if model.device.type == "cuda" else None)
    kv_events: list[KvEvent] = []
    cache = HybridCache(memory, on_event=kv_events.append, attention_kind=model.attention_kind)
    inbox: queue.SimpleQueue[Event] = queue.SimpleQueue()
    layout = CacheLayout(model.fingerprint, layer_groups(model.layers))
    transfers = EngineTransfers(layout, memory, options, outbox.put, inbox.put)
    budgets = _measured_budgets(runner, cache, options)
    engine = EngineLoop(
        inbox=inbox,
        runner=runner,
        cache=cache,
        kv_events=kv_events,
        publish=partial(transfers.publish, "kv"),
        remote=RemoteCaches(runner, cache, Fetcher(runner, transfers), inbox.put),
        profiler=_profiler(runner, cache, options, outbox, budgets[options.role].step_tokens),
        send=outbox.put,
        role=options.role,
        max_waiting=options.max_waiting,
        budgets=budgets,
    )
    log.info("the model computes on %s: %s", _device_name(model.device), model.arithmetic)
    return engine, transfers


def _measured_budgets(runner: Runner, cache: HybridCache, options: Options) -> dict[Role, Budgets]:
    """Warm up, and measure how long steps should be, unless the options say it."""
    context = max_context(runner.model, options)
    warm_up(runner, cache, context)
    tokens = options.step_tokens
    if not tokens:
        step = partial(step_seconds, runner, cache)
        tokens = step_tokens(measure_steps(step, options.profile_seconds * _STEPS_SHARE, context))
    budgets = role_budgets(tokens)
    log.info("a step computes up to %d tokens, %d of a prompt beside decodes", *budgets[options.role])
    return budgets


def _profiler(runner: Runner, cache: HybridCache, options: Options, outbox: Outbox, chunk_tokens: int) -> Profiler:
    """Measure prefills, with the model and in the chunks as it serves."""
    geometry = runner.memory.geometry
    profiler = Profiler(geometry.state_bytes, geometry.token_bytes, partial(put_profile, outbox))
    prefill = partial(prefill_seconds, runner, cache, chunk_tokens)
    seconds = options.profile_seconds * (1 - _STEPS_SHARE)
    profiler.measure(prefill, seconds, max_context(runner.model, options))
    return profiler


def _cache_memory(model: Model, options: Options) -> CacheMemory:
    """Reserve the cache: slots, and pages in what they leave. Raises ConfigError if one sequence of the longest context
    does not fit or is not possible."""
    geometry, context = CacheGeometry(model.layers), max_context(model, options)
    cache_mib = options.cache_mib or _default_cache_mib(model)
    states = options.max_running * geometry.slot_bytes
    num_pages = (cache_mib * MIB - states) // geometry.page_bytes
    if num_pages < (least := geometry.pages_for(context)):
        raise ConfigError(_too_little(model, options, cache_mib, states, least * geometry.page_bytes))
    if options.cache_mib and model.device.type == "cpu" and cache_mib > (available := available_bytes() // MIB):
        raise ConfigError(
            f"--cache-mib {cache_mib} is more than the {available} MiB of memory that are available: give less"
        )
    try:
        memory = CacheMemory(
            geometry,
            num_pages=num_pages,
            num_slots=options.max_running,
            max_context=context,
            device=model.device,
            is_shared=model.device.type == "cpu",  # with the mover
        )
    except (RuntimeError, MemoryError, OSError) as error:
        named = f"--cache-mib {cache_mib}" if options.cache_mib else f"a cache of {cache_mib} MiB"
        raise ConfigError(f"{named} cannot be reserved: {error}") from error
    log.info(
        "the cache has %d MiB: %d pages of %d tokens, and %d MiB for the states of %d running sequences",
        cache_mib,
        num_pages,
        geometry.page_tokens,
        states // MIB,
        options.max_running,
    )
    return memory


def _too_little(model: Model, options: Options, cache_mib: int, states: int, rows: int) -> str:
    """Return the refusal of a cache that has no room for so many bytes of states, and of one sequence's rows."""
    states_mib, rows_mib, least_mib = (-(-nbytes // MIB) for nbytes in (states, rows, states + rows))
    too_little = (
        f"too little for the states of {options.max_running} sequences ({states_mib} MiB, --max-running) and one "
        f"sequence of {max_context(model, options)} tokens ({rows_mib} MiB, --max-context)"
    )
    smaller = "a smaller --max-context or --max-running"
    if options.cache_mib:
        return f"--cache-mib {cache_mib} is {too_little}: give --cache-mib {least_mib} or more, or {smaller}"
    if model.device.type == "cpu":
        return f"the cache's {cache_mib} MiB are {too_little}: give --cache-mib {least_mib} or more, or {smaller}"
    return (
        f"the weights leave {cache_mib} MiB of the GPU's memory for the cache, which is {too_little}: give {smaller}, "
        "or --device cpu"
    )


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return f"the GPU {torch.cuda.get_device_name(device)}"
    return f"the CPU with {torch.get_num_threads()} threads"


def _default_cache_mib(model: Model) -> int:
    """Return the memory that the weights leave on an accelerator, less a tenth for activations."""
    if model.device.type != "cuda":
        return CPU_CACHE_MIB
    free_bytes, _ = torch.cuda.mem_get_info(model.device)
    return free_bytes * 9 // 10 // MIB


def max_context(model: Model, options: Options) -> int:
    """Return the most tokens of a sequence. Raises ConfigError if the options exceed the model's maximum."""
    wanted = options.max_context_tokens or model.max_context
    if wanted > model.max_context:
        raise ConfigError(
            f"--max-context {wanted} is more than the {model.max_context} tokens of this model: give at most those, or "
            "leave it out"
        )
    return wanted
