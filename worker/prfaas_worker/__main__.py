"""The `prfaas-worker` command: reads the flags and serves."""

from prfaas.console import begin_logs, run_program
from prfaas.telemetry.logs import configure_logs
from prfaas_worker.options import parse


def main() -> None:
    options = parse()
    begin_logs("prfaas-worker", lambda: configure_logs(f"{options.place} front", options.log_format))

    def serve() -> int:
        from prfaas_worker.front.server import run  # here, so that flags are read where an extra is missing

        return run(options)

    run_program("prfaas-worker", serve, extra="worker", config_code=2)


if __name__ == "__main__":
    main()
