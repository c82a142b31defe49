"""The engine process: `python -m prfaas_worker.engine FD OPTIONS`, started and watched by the front alone.

FD is the inherited end of a unix socket pair, OPTIONS the front's options as JSON. Signals are the front's business: a
terminal's Ctrl-C reaches both processes, and only the front knows what still has to finish.
"""

import signal
import socket
import sys

import msgspec

from prfaas.errors import ConfigError
from prfaas.wire.engine import Ready, StartFailed, encode_batch
from prfaas_worker.cache.cache import HybridCache
from prfaas_worker.cache.memory import CacheGeometry, CacheMemory
from prfaas_worker.engine.link import Desk, Outbox, serve_front
from prfaas_worker.engine.loop import Engine
from prfaas_worker.engine.runner import Runner
from prfaas_worker.engine.sequences import Sequence
from prfaas_worker.logs import configure_logs
from prfaas_worker.models import load_model
from prfaas_worker.models.base import Model
from prfaas_worker.options import Options
from prfaas_worker.transfer.fetch import Fetch, Wanted
from prfaas_worker.transfer.layout import Place, layer_groups
from prfaas_worker.transfer.offers import Offers
from prfaas_worker.transfer.sender import Sender, listen

MIB = 1 << 20


def main() -> None:
    """Load the model, open the data port, and step until the front goes away."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    options = msgspec.json.decode(sys.argv[2], type=Options)
    configure_logs(options, "engine")
    front = socket.socket(fileno=int(sys.argv[1]))
    try:
        model, directory = load_model(options.model_source, options.threads or None)
        memory = cache_memory(model, options)
        listener = _listen(options)
    except ConfigError as error:
        front.sendall(encode_batch([StartFailed(str(error))]))
        sys.exit(1)
    outbox = Outbox(front)
    engine, offers = assemble(model, memory, options, outbox)
    desk = Desk(engine, offers, Sender(listener, offers).monitor, outbox)
    max_context = _max_context(model, options)
    outbox.put(Ready(model.fingerprint, str(directory), model.vocab_size, max_context, options.data_port))
    serve_front(front, desk)
    engine.run()


def assemble(model: Model, memory: CacheMemory, options: Options, outbox: Outbox) -> tuple[Engine, Offers]:
    """Join the step loop with what it needs of the transfer side."""
    groups = layer_groups(model.layers)
    capacity = options.max_running + options.max_waiting
    offers = Offers((model.fingerprint, groups, model.hidden_size), options.data_port, capacity)

    def new_fetch(sequence: Sequence) -> Fetch:
        generate, lease = sequence.request.generation, sequence.held
        wanted = Wanted(
            request_id=generate.request_id,
            model_name=options.model_name,
            prefill_url=generate.prefill_url,
            token_ids=generate.token_ids,
            start_token=sequence.computed_tokens,
            cache_salt=generate.cache_salt,
            fingerprint=model.fingerprint,
            groups=groups,
            hidden_size=model.hidden_size,
        )
        return Fetch(wanted, Place(memory, lease.slot, lease.pages), offers.counters)

    engine = Engine(
        Runner(model, memory),
        HybridCache(memory),
        new_fetch,
        outbox.put,
        role=options.role,
        max_waiting=options.max_waiting,
    )
    offers.on_end = engine.offer_ended
    return engine, offers


def cache_memory(model: Model, options: Options) -> CacheMemory:
    """Reserve the cache.

    Raises:
        ConfigError: a single sequence of the longest context would not fit.

    """
    geometry, context = CacheGeometry(model.layers), _max_context(model, options)
    num_pages = options.cache_mib * MIB // geometry.page_bytes
    if num_pages < (wanted := geometry.pages_for(context)):
        raise ConfigError(
            f"--cache-mib {options.cache_mib} is too little for one sequence of {context} tokens: give "
            f"--cache-mib {-(-wanted * geometry.page_bytes // MIB)} or more, or a smaller --max-context"
        )
    try:
        return CacheMemory(
            geometry, num_pages=num_pages, num_slots=options.max_running, max_context=context, device=model.device
        )
    except (RuntimeError, MemoryError) as error:
        raise ConfigError(f"--cache-mib {options.cache_mib} cannot be reserved: {error}") from error


def _max_context(model: Model, options: Options) -> int:
    return min(model.max_context, options.max_context_tokens or model.max_context)


def _listen(options: Options) -> socket.socket:
    try:
        return listen(options.host, options.data_port)
    except OSError as error:
        raise ConfigError(f"data port {options.host}:{options.data_port} cannot be opened: {error.strerror}") from error


if __name__ == "__main__":
    main()
