"""The engine process: `python -m prfaas_worker.engine FD OPTIONS`, started and watched by the front alone.

FD is the inherited end of a unix socket pair, OPTIONS the front's options as JSON. Signals are the front's business:
only it knows what still has to finish.
"""

import contextlib
import signal
import socket
import sys

import msgspec

from prfaas.errors import ConfigError
from prfaas.wire.engine import Ready, StartFailed, encode_batch
from prfaas_worker.engine.parent import end_with_front
from prfaas_worker.logs import configure_logs
from prfaas_worker.options import Options


def main() -> None:
    """Load the model, open the data port, and step until the front goes away."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    front = socket.socket(fileno=int(sys.argv[1]))
    end_with_front(front)
    options = msgspec.json.decode(sys.argv[2], type=Options)
    configure_logs(options, "engine")
    _run(options, front)


def _run(options: Options, front: socket.socket) -> None:
    # Imported here: torch takes seconds, and by then the process must be tied to the front.
    from prfaas_worker.engine.assembly import assemble, max_context
    from prfaas_worker.engine.link import Desk, Outbox, serve_front
    from prfaas_worker.models import load_model
    from prfaas_worker.transfer.sender import Sender
    from prfaas_worker.transfer.traffic import traffic_of

    try:
        model, directory = load_model(options.model_source, options.threads or None, options.device, options.dtype)
        outbox = Outbox(front)
        traffic = traffic_of(options)
        engine, offers = assemble(model, directory, options, outbox, traffic)
        listener = _listen(options)
    except ConfigError as error:
        with contextlib.suppress(OSError):  # the front may have met the same trouble, and be gone
            front.sendall(encode_batch([StartFailed(str(error))]))
        sys.exit(1)
    Sender(listener, offers, traffic)
    desk = Desk(engine, offers, traffic, outbox)
    ready = Ready(model.fingerprint, str(directory), model.vocab_size, max_context(model, options), options.data_port)
    outbox.put([ready])
    serve_front(front, desk)
    engine.run()


def _listen(options: Options) -> socket.socket:
    from prfaas_worker.transfer.sender import listen

    try:
        return listen(options.host, options.data_port)
    except OSError as error:
        raise ConfigError(f"data port {options.host}:{options.data_port} cannot be opened: {error.strerror}") from error


if __name__ == "__main__":
    main()
