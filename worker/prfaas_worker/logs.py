"""One form of log lines for both processes of a worker: time, level, instance and process, then the message."""

import logging

from prfaas_worker.options import Options


def configure_logs(options: Options, process: str) -> None:
    """Log to standard error from INFO up."""
    place = "/".join(part for part in (options.cluster, options.pool, options.instance) if part)
    form = f"%(asctime)s %(levelname)s {place} {options.role} {process}: %(message)s"
    logging.basicConfig(level=logging.INFO, format=form)
