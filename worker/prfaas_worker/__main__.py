"""`prfaas-worker`: read the flags and serve."""

import sys

from prfaas_worker.front.server import run
from prfaas_worker.logs import configure_logs
from prfaas_worker.options import parse


def main() -> None:
    """Run one worker until it is told to stop."""
    options = parse()
    configure_logs(options, "front")
    sys.exit(run(options))


if __name__ == "__main__":
    main()
