"""The `prfaas-gateway` command."""

from collections.abc import Sequence

from prfaas.console import begin_logs, run_program
from prfaas.telemetry.logs import configure_logs
from prfaas_gateway.options import parse


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the gateway until SIGTERM or SIGINT."""
    options = parse(arguments)
    begin_logs("prfaas-gateway", lambda: configure_logs(f"gateway {options.policy}".strip(), options.log_format))

    def serve() -> None:
        import uvloop  # here, so that wrong flags are reported even where an extra is missing

        from prfaas_gateway.server import run

        uvloop.run(run(options))

    run_program("prfaas-gateway", serve, extra="gateway", config_code=2)


if __name__ == "__main__":
    main()
