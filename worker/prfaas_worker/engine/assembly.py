"""Puts an engine together: the model's memory, the step loop, and what it needs of transfers, grammars and profile."""

from functools import partial
from pathlib import Path

import torch

from prfaas.errors import ConfigError
from prfaas.wire.engine import Measured
from prfaas.wire.kvevents import KvEvent
from prfaas.wire.prefill import PrefillRequest, PrefixRequest
from prfaas_worker.cache.cache import HybridCache
from prfaas_worker.cache.memory import CacheGeometry, CacheMemory
from prfaas_worker.cache.populate import populate_in_background
from prfaas_worker.cache.tiers import Tiers
from prfaas_worker.engine.grammar import Grammars, Vocabulary, read_vocabulary
from prfaas_worker.engine.link import Outbox
from prfaas_worker.engine.loop import Engine
from prfaas_worker.engine.parts import Parts
from prfaas_worker.engine.profile import Profiler
from prfaas_worker.engine.runner import Runner, prefill_seconds
from prfaas_worker.engine.schedule import BUDGETS
from prfaas_worker.engine.sequences import Sequence
from prfaas_worker.models.base import Model
from prfaas_worker.options import Options
from prfaas_worker.tokenizer import load_tokenizer
from prfaas_worker.transfer.connections import Connections
from prfaas_worker.transfer.fetch import FetchRequest, RemoteFetch
from prfaas_worker.transfer.layout import CacheLayout, layer_groups
from prfaas_worker.transfer.offers import Offers
from prfaas_worker.transfer.pull import Shared
from prfaas_worker.transfer.staging import Staging
from prfaas_worker.transfer.traffic import Traffic

MIB = 1 << 20
CPU_CACHE_MIB = 1024
LARGE_VOCABULARY = 10_000
"""Above this many tokens the first grammar would hold every stream up for most of a second: it is prepared at start."""


def assemble(
    model: Model, directory: Path, options: Options, outbox: Outbox, traffic: Traffic
) -> tuple[Engine, Offers]:
    """Return the step loop of a model and the prefills that it offers to others.

    Raises:
        ConfigError: the cache that the options ask for cannot be had.

    """
    memory = _cache_memory(model, options)
    staging = Staging(memory) if model.device.type == "cuda" else None
    layout = CacheLayout(model.fingerprint, layer_groups(model.layers), model.hidden_size)
    capacity = options.max_running + options.max_waiting
    offers = Offers(layout, options.data_port, capacity)

    shared = Shared(layout, Connections(traffic.door), offers.counters, traffic)

    def new_fetch(sequence: Sequence, is_prefix: bool) -> RemoteFetch:
        request, prompt = sequence.request, sequence.request.prompt
        known = {
            "request_id": prompt.request_id,
            "model": options.model_name,
            "token_ids": sequence.token_ids[:],
            "start_token": sequence.computed_tokens,
            "cache_salt": prompt.cache_salt,
        }
        if is_prefix:
            url, cluster, body = request.prefix_url, request.prefix_cluster, PrefixRequest(**known)
        else:
            generate = request.generation
            url, cluster = generate.prefill_url, generate.prefill_cluster
            body = PrefillRequest(**known, prefix_url=generate.prefix_url, prefix_cluster=request.prefix_cluster)
        wanted = FetchRequest(request.handle, body, url, cluster, request.trace)
        return RemoteFetch(wanted, runner.place(sequence.held), shared)

    runner = Runner(model, memory, staging)
    events: list[KvEvent] = []
    sizes = memory.geometry.state_bytes, memory.geometry.token_bytes
    parts = Parts(
        runner=runner,
        cache=HybridCache(memory, _tiers(model, options), on_event=events.append, attention_kind=model.attention_kind),
        events=events,
        grammars=_grammars(model, directory),
        profiler=Profiler(*sizes, lambda profile: outbox.put([Measured(profile)])),
        offers=offers,
        traffic=traffic,
        new_fetch=new_fetch,
        answer=outbox.put,
    )
    _compile(model, options)
    prefill = partial(prefill_seconds, parts.runner, parts.cache, BUDGETS[options.role].step_tokens)
    parts.profiler.measure(prefill, options.profile_seconds, max_context(model, options))
    engine = Engine(parts, role=options.role, max_waiting=options.max_waiting)
    if options.cache_mib and model.device.type == "cpu":  # the default is there for whoever has not thought of memory
        populate_in_background(memory.pages.data_ptr(), memory.pages.nbytes)
    offers.on_end = engine.offer_ended
    offers.counters.on_end = lambda transfer: outbox.put([transfer])
    return engine, offers


def _cache_memory(model: Model, options: Options) -> CacheMemory:
    """Reserve the cache.

    Raises:
        ConfigError: a single sequence of the longest context would not fit, or the model has no such context.

    """
    geometry, context = CacheGeometry(model.layers), max_context(model, options)
    cache_mib = options.cache_mib or _default_cache_mib(model)
    num_pages = cache_mib * MIB // geometry.page_bytes
    if num_pages < (wanted := geometry.pages_for(context)):
        raise ConfigError(
            f"--cache-mib {cache_mib} is too little for one sequence of {context} tokens: give "
            f"--cache-mib {-(-wanted * geometry.page_bytes // MIB)} or more, or a smaller --max-context"
        )
    try:
        return CacheMemory(
            geometry, num_pages=num_pages, num_slots=options.max_running, max_context=context, device=model.device
        )
    except (RuntimeError, MemoryError) as error:
        raise ConfigError(f"--cache-mib {cache_mib} cannot be reserved: {error}") from error


def _default_cache_mib(model: Model) -> int:
    """On an accelerator what the weights leave, less a tenth for activations and their fragments."""
    if model.device.type != "cuda":
        return CPU_CACHE_MIB
    free_bytes, _ = torch.cuda.mem_get_info(model.device)
    return free_bytes * 9 // 10 // MIB


def max_context(model: Model, options: Options) -> int:
    """Return the most tokens of a sequence.

    Raises:
        ConfigError: the options ask for more than the model was made for.

    """
    wanted = options.max_context_tokens or model.max_context
    if wanted > model.max_context:
        raise ConfigError(
            f"--max-context {wanted} is more than the {model.max_context} tokens of this model: give at most those, or "
            "leave it out"
        )
    return wanted


def _compile(model: Model, options: Options) -> None:
    """Compile the decode steps that were asked for; the model has its memory.

    Raises:
        ConfigError: it has none to compile, or there is no compiler.

    """
    if not options.compile:
        return
    from prfaas_worker.models.kimi_linear.compiled import StepShape
    from prfaas_worker.models.kimi_linear.model import KimiLinear

    if not isinstance(model, KimiLinear):
        raise ConfigError("--compile is for Kimi Linear on the CPU: leave it out")
    model.compile_decodes([StepShape(*shape) for shape in options.compile])


def _tiers(model: Model, options: Options) -> Tiers | None:
    """Return what the cache gives its evicted entries to, None where it has nothing below it.

    Raises:
        ConfigError: the directory cannot be used, or another process has it.

    """
    if not (options.host_cache_mib or options.disk_cache):
        return None
    return Tiers(
        model.fingerprint,
        host_bytes=options.host_cache_mib * MIB,
        disk_directory=Path(options.disk_cache) if options.disk_cache else None,
        disk_bytes=options.disk_cache_mib * MIB,
    )


def _grammars(model: Model, directory: Path) -> Grammars:
    def vocabulary() -> Vocabulary:
        return read_vocabulary(load_tokenizer(directory), tuple(sorted(model.eos_token_ids)), model.vocab_size)

    grammars = Grammars(vocabulary)
    if model.vocab_size > LARGE_VOCABULARY:
        grammars.warm()
    return grammars
