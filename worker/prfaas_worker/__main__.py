"""`prfaas-worker`: read the flags and serve."""

import sys

from prfaas.errors import ConfigError
from prfaas_worker.front.server import run
from prfaas_worker.logs import configure_logs
from prfaas_worker.options import parse


def main() -> None:
    """Run one worker until it is told to stop."""
    options = parse()
    try:
        configure_logs(options, "front")
        code = run(options)
    except ConfigError as error:
        sys.stderr.write(f"prfaas-worker: {error}\n")
        code = 2
    except KeyboardInterrupt:  # a second Ctrl-C: somebody does not want to wait for the requests that still run
        code = 130
    sys.exit(code)


if __name__ == "__main__":
    main()
