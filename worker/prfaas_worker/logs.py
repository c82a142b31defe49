"""Where a worker's log lines come from: its instance, its role, and which of its two processes."""

from prfaas.telemetry import logs
from prfaas_worker.options import Options


def configure_logs(options: Options, process: str) -> None:
    """Log to standard error.

    Raises:
        ConfigError: as `prfaas.telemetry.logs`.

    """
    place = "/".join(part for part in (options.cluster, options.pool, options.instance) if part)
    logs.configure_logs(f"{place} {options.role} {process}")
