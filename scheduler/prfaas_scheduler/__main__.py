"""The `prfaas-scheduler` command."""

import asyncio
from collections.abc import Sequence

from prfaas.console import begin_logs, read_options, run_program
from prfaas.telemetry.logs import configure_logs
from prfaas_scheduler.options import HELP, SchedulerOptions


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the scheduler; exit 0 after SIGTERM, 1 with one sentence for an error of ours, 2 for a wrong flag."""
    options = read_options(SchedulerOptions, "prfaas-scheduler", HELP, arguments)
    begin_logs("prfaas-scheduler", lambda: configure_logs(f"scheduler {options.policy}", options.log_format))

    def serve() -> None:
        from prfaas_scheduler import serve as process  # here, so that flags are read where an extra is missing

        asyncio.run(process.serve(options))

    run_program("prfaas-scheduler", serve, extra="scheduler")


if __name__ == "__main__":
    main()
