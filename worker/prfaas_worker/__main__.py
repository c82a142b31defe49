"""`prfaas-worker`: read the flags and serve."""

import sys

from prfaas_worker.front.server import run
from prfaas_worker.logs import configure_logs
from prfaas_worker.options import parse


def main() -> None:
    """Run one worker until it is told to stop."""
    options = parse()
    configure_logs(options, "front")
    try:
        code = run(options)
    except KeyboardInterrupt:  # a second Ctrl-C: somebody does not want to wait for the requests that still run
        code = 130
    sys.exit(code)


if __name__ == "__main__":
    main()
