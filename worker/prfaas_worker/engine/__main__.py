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
from prfaas_worker.engine.link import Desk, Outbox, serve_front
from prfaas_worker.engine.loop import Engine
from prfaas_worker.engine.runner import Runner
from prfaas_worker.engine.schedule import Limits
from prfaas_worker.engine.sequences import Request
from prfaas_worker.logs import configure_logs
from prfaas_worker.models import load_model
from prfaas_worker.models.base import Model
from prfaas_worker.options import Options
from prfaas_worker.transfer.fetch import Fetch, Wanted
from prfaas_worker.transfer.layout import layer_groups
from prfaas_worker.transfer.offers import Offers
from prfaas_worker.transfer.sender import Sender, listen

CHUNK_TOKENS = 512


def main() -> None:
    """Load the model, open the data port, and step until the front goes away."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    options = msgspec.json.decode(sys.argv[2], type=Options)
    configure_logs(options, "engine")
    front = socket.socket(fileno=int(sys.argv[1]))
    try:
        model, directory = load_model(options.model_source, options.threads or None)
        listener = _listen(options)
    except ConfigError as error:
        front.sendall(encode_batch([StartFailed(str(error))]))
        sys.exit(1)
    max_context = min(model.max_context, options.max_context_tokens or model.max_context)
    outbox = Outbox(front)
    engine, offers = assemble(model, options, outbox)
    desk = Desk(engine, offers, Sender(listener, offers).monitor, outbox)
    outbox.put(Ready(model.fingerprint, str(directory), model.vocab_size, max_context, options.data_port))
    serve_front(front, desk)
    engine.run()


def assemble(model: Model, options: Options, outbox: Outbox) -> tuple[Engine, Offers]:
    """Join the step loop with what it needs of the transfer side."""
    groups = layer_groups(model.layers)
    capacity = options.max_running + options.max_waiting
    offers = Offers((model.fingerprint, groups, model.hidden_size), options.data_port, capacity)

    def new_fetch(request: Request) -> Fetch:
        generate = request.generation
        wanted = Wanted(
            request_id=generate.request_id,
            model_name=options.model_name,
            prefill_url=generate.prefill_url,
            token_ids=request.token_ids,
            fingerprint=model.fingerprint,
            groups=groups,
            hidden_size=model.hidden_size,
        )
        return Fetch(wanted, request.admitted_cache, offers.counters)

    limits = Limits(options.max_running, CHUNK_TOKENS)
    engine = Engine(Runner(model), limits, options.max_waiting, new_fetch, outbox.put)
    offers.on_end = engine.offer_ended
    return engine, offers


def _listen(options: Options) -> socket.socket:
    try:
        return listen(options.host, options.data_port)
    except OSError as error:
        raise ConfigError(f"data port {options.host}:{options.data_port} cannot be opened: {error.strerror}") from error


if __name__ == "__main__":
    main()
