"""Builds an engine that computes: loads its model, reserves the cache, and measures before it serves."""

import logging
from functools import partial
from pathlib import Path

import torch

from prfaas.errors import CapacityError, ConfigError
from prfaas.schedule import Budgets, role_budgets, step_tokens
from prfaas.util import MIB
from prfaas.wire.engine import Role
from prfaas_worker.cache.cache import HybridCache
from prfaas_worker.cache.memory import CacheMemory
from prfaas_worker.cache.staging import Staging, pin
from prfaas_worker.cache_spec import CacheGeometry
from prfaas_worker.engine.ipc import Outbox, put_profile
from prfaas_worker.engine.loop import EngineLoop
from prfaas_worker.engine.profiler import Profiler, measure_steps
from prfaas_worker.engine.remote import EngineTransfers
from prfaas_worker.engine.runner import Runner, prefill_seconds, step_seconds, warm_up
from prfaas_worker.engine.wiring import HOST_CACHE_MIB, Calibration, connect, count_pages, max_context
from prfaas_worker.models import load_model
from prfaas_worker.models.base import Model
from prfaas_worker.options import Options

log = logging.getLogger(__name__)

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
    memory, is_on_gpu = _cache_memory(model, options), model.device.type == "cuda"
    runner = Runner(model, memory, Staging(memory) if is_on_gpu else None)
    connected = connect(
        runner, options, outbox, partial(_calibrate, runner, options, outbox), pin if is_on_gpu else None
    )
    log.info("the model computes on %s: %s", _device_name(model.device), model.arithmetic)
    return connected


def _calibrate(runner: Runner, options: Options, outbox: Outbox, cache: HybridCache) -> Calibration:
    budgets = _measured_budgets(runner, cache, options)
    return Calibration(budgets, _profiler(runner, cache, options, outbox, budgets[options.role].step_tokens))


def _measured_budgets(runner: Runner, cache: HybridCache, options: Options) -> dict[Role, Budgets]:
    """Warm up, and measure how long steps should be, unless the options say it."""
    context = max_context(runner.model, options)
    warm_up(runner, cache, context)
    tokens = options.step_tokens
    if not tokens:
        step = partial(step_seconds, runner, cache)
        tokens = step_tokens(measure_steps(step, options.profile_seconds * _STEPS_SHARE, context))
    return role_budgets(tokens)


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
    does not fit with its state in pages, or is not possible."""
    geometry, context, is_on_gpu = CacheGeometry(model.layers), max_context(model, options), model.device.type == "cuda"
    cache_mib = options.cache_mib or _default_cache_mib(model)
    num_pages = count_pages(geometry, options, context, cache_mib, is_on_gpu=is_on_gpu)
    try:
        return CacheMemory(
            geometry,
            num_pages=num_pages,
            num_slots=options.slots,
            max_context=context,
            device=model.device,
            is_shared=not is_on_gpu,  # with the mover
        )
    except (RuntimeError, MemoryError, OSError) as error:
        named = f"--cache-mib {cache_mib}" if options.cache_mib else f"a cache of {cache_mib} MiB"
        raise ConfigError(f"{named} cannot be reserved: {error}") from error


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return f"the GPU {torch.cuda.get_device_name(device)}"
    return f"the CPU with {torch.get_num_threads()} threads"


def _default_cache_mib(model: Model) -> int:
    """Return the memory that the weights leave on an accelerator, less a tenth for activations."""
    if model.device.type != "cuda":
        return HOST_CACHE_MIB
    free_bytes, _ = torch.cuda.mem_get_info(model.device)
    return free_bytes * 9 // 10 // MIB
