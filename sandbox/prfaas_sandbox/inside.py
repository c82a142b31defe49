"""Pid 1 of the sandbox: reaps orphans, and ends everything when the host's process has gone.

`python -m prfaas_sandbox.inside STATE`, with the reading end of a pipe as standard input whose only writing end the
host's process holds. However that process ends, the pipe does too; this process then exits, and with it the kernel ends
every process of the PID namespace, and the network and mount namespaces with the last of them.
"""

import os
import sys
import threading
from pathlib import Path


def main() -> None:
    """Fork the supervisor and stay behind."""
    state = Path(sys.argv[1])
    supervisor = os.fork()
    if supervisor == 0:
        from prfaas_sandbox.supervisor import main as supervise

        supervise(state)
        return
    threading.Thread(target=_end_with_host, daemon=True).start()
    while True:
        pid, status = os.wait()
        if pid == supervisor:
            os._exit(os.waitstatus_to_exitcode(status) & 0xFF)


def _end_with_host() -> None:
    while os.read(0, 1):
        continue
    os._exit(0)


if __name__ == "__main__":
    main()
