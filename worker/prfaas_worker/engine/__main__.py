"""The engine process: `python -m prfaas_worker.engine FD OPTIONS`, started and watched only by the front.

FD is the inherited end of a unix socket pair, OPTIONS the front's options as JSON. The front handles signals: only the
front knows which requests still have to finish.
"""

import contextlib
import ctypes
import os
import signal
import socket
import sys
from typing import Final

import msgspec

from prfaas.errors import CapacityError, ConfigError
from prfaas.telemetry.logs import configure_logs
from prfaas.wire.engine import Ready, StartFailed, encode_batch
from prfaas_worker.options import Options

_PR_SET_PDEATHSIG: Final = 1


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    front = socket.socket(fileno=int(sys.argv[1]))
    _end_with_front(front)
    options = msgspec.json.decode(sys.argv[2], type=Options)
    configure_logs(f"{options.place} engine", options.log_format)
    _run(options, front)


def _end_with_front(front: socket.socket) -> None:
    """Have the kernel kill this process when the front ends: no thread reads the socket while a model loads."""
    if sys.platform != "linux":
        return  # there it ends with its socket, once it is loaded
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL):
        raise OSError(ctypes.get_errno(), "prctl")
    with contextlib.suppress(BlockingIOError):
        if not front.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT):  # it died before it could be watched
            os._exit(0)


def _run(options: Options, front: socket.socket) -> None:
    # Imported here: torch takes seconds, and by then the process must be tied to the front.
    from prfaas_worker.engine.ipc import FrontMessages, Outbox, serve_front
    from prfaas_worker.engine.wiring import max_context

    if options.emulate:
        from prfaas_worker.emulated.assembly import load_and_assemble
    else:
        from prfaas_worker.engine.assembly import load_and_assemble

    try:
        outbox = Outbox(front)
        model, directory, engine, transfers = load_and_assemble(options, outbox)
        messages = FrontMessages(engine, transfers, outbox)
        transfers.start(messages.answer)
    except (ConfigError, CapacityError) as error:
        with contextlib.suppress(OSError):  # the front may have failed for the same reason, and be gone
            front.sendall(encode_batch([StartFailed(str(error))]))
        sys.exit(1)
    ready = Ready(model.fingerprint, str(directory), model.vocab_size, max_context(model, options), options.data_port)
    outbox.put([ready])
    serve_front(front, messages)
    engine.run()


if __name__ == "__main__":
    main()
