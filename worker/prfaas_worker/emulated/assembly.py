"""Builds an emulated engine: what its model would be, its memory, and the times of its steps."""

import hashlib
import logging
import math
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import msgspec

from prfaas.errors import ConfigError
from prfaas.schedule import STEP_SIZES, role_budgets, step_tokens
from prfaas.wire.kvevents import AttentionSpecKind
from prfaas_worker.assets import model_directory, read_object
from prfaas_worker.cache.cache import HybridCache
from prfaas_worker.cache_spec import CacheGeometry, LayerSpec
from prfaas_worker.emulated.instance import EmulatedInstance
from prfaas_worker.emulated.memory import EmulatedMemory
from prfaas_worker.emulated.profile import read_profile
from prfaas_worker.emulated.runner import TOKENS, EmulatedRunner
from prfaas_worker.engine.ipc import Outbox, put_profile
from prfaas_worker.engine.loop import EngineLoop
from prfaas_worker.engine.profiler import Profiler
from prfaas_worker.engine.remote import EngineTransfers
from prfaas_worker.engine.wiring import HOST_CACHE_MIB, Calibration, connect, count_pages, max_context
from prfaas_worker.options import Options

log = logging.getLogger(__name__)

_FIRST_LENGTH: Final = 8192
"""Above those that a worker measures at its start; each next one is twice as long."""


@dataclass
class EmulatedModel:
    """What the engine knows of a model that nobody computes. See `ModelFacts`."""

    vocab_size: int
    max_context: int
    fingerprint: str
    layers: tuple[LayerSpec, ...]
    attention_kind: AttentionSpecKind = "full_attention"
    eos_token_ids: frozenset[int] = frozenset()


def load_and_assemble(options: Options, outbox: Outbox) -> tuple[EmulatedModel, Path, EngineLoop, EngineTransfers]:
    """Return what the real engine's function of this name does, after the time that it takes to load. Raises
    ConfigError if the options name what cannot be had."""
    instance = EmulatedInstance(read_profile(options.emulate), options.cache_scale, options.stretch)
    directory = model_directory(options.model_source)
    model = _model_of(instance, directory, options)
    memory = _cache_memory(model, options)
    time.sleep(options.load_seconds * options.stretch)
    log.info(
        "nothing is computed: steps take the time of %s, times %g, and the cache has 1/%d of its bytes",
        instance.profile.name,
        instance.stretch,
        instance.cache_scale,
    )
    tokens = options.step_tokens or _step_tokens(instance, max_context(model, options))
    runner = EmulatedRunner(model, memory, instance, tokens)
    plain = msgspec.structs.replace(options, wire_codec="none")  # memory without content would shrink to nothing
    return (
        model,
        directory,
        *connect(runner, plain, outbox, partial(_calibrate, runner, instance, tokens, options, outbox)),
    )


def _model_of(instance: EmulatedInstance, directory: Path, options: Options) -> EmulatedModel:
    path = directory / "config.json"
    vocab_size = read_object(path).get("vocab_size")
    if not isinstance(vocab_size, int) or vocab_size < TOKENS.stop:
        raise ConfigError(f"{path}: vocab_size is {vocab_size!r}; an emulated engine draws tokens up to {TOKENS[-1]}")
    layers = instance.layers()
    # Of one model and scale, whatever hardware computes it: these exchange caches.
    fingerprint = hashlib.sha256(repr(("emulated", instance.profile.model, layers, vocab_size)).encode())
    longest = options.max_context_tokens or instance.longest_tokens
    return EmulatedModel(vocab_size, longest, fingerprint.hexdigest(), layers)


def _cache_memory(model: EmulatedModel, options: Options) -> EmulatedMemory:
    geometry = CacheGeometry(model.layers)
    cache_mib = options.cache_mib or HOST_CACHE_MIB
    num_pages = count_pages(geometry, options, max_context(model, options), cache_mib)
    return EmulatedMemory(geometry, num_pages=num_pages, num_slots=options.slots)


def _calibrate(
    runner: EmulatedRunner,
    instance: EmulatedInstance,
    tokens: int,
    options: Options,
    outbox: Outbox,
    _cache: HybridCache,
) -> Calibration:
    """Say at once what a worker would measure: the length of its steps, `tokens`, and the cost of prefills."""
    context, geometry = max_context(runner.model, options), runner.memory.geometry
    prefill = partial(instance.chunk_seconds, 0, is_first=True)
    profiler = Profiler(geometry.state_bytes, geometry.token_bytes, partial(put_profile, outbox))
    profiler.measure(prefill, math.inf, context)
    length = _FIRST_LENGTH
    while length <= context:
        profiler.observe(length, prefill(length))
        length *= 2
    return Calibration(role_budgets(tokens, in_order=instance.profile.in_order), profiler)


def _step_tokens(instance: EmulatedInstance, context: int) -> int:
    sizes = [size for size in STEP_SIZES if size <= context]
    return step_tokens({size: instance.chunk_seconds(0, size, is_first=True) / instance.stretch for size in sizes})
