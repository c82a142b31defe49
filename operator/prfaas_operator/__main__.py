"""The `prfaas-operator` command."""

import asyncio
import logging
from collections.abc import Sequence

from prfaas.console import begin_logs, read_options, run_program
from prfaas.errors import PrfaasError
from prfaas_operator import logs
from prfaas_operator.options import HELP, OperatorOptions

log = logging.getLogger(__name__)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the operator. The exit code is 0 after SIGTERM, 1 after a logged error of ours and 2 for a wrong flag."""
    options = read_options(OperatorOptions, "prfaas-operator", HELP, arguments)
    begin_logs("prfaas-operator", lambda: logs.configure("operator", options.log_format))

    def serve() -> int:
        # here, so that wrong flags are reported even where an extra is missing
        from prfaas_operator import serve as process

        try:
            asyncio.run(process.serve(options))
        except (PrfaasError, OSError) as error:
            log.error("%s", error)
            return 1
        return 0

    run_program("prfaas-operator", serve, extra="operator")


if __name__ == "__main__":
    main()
