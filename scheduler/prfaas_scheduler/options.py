"""The flags of `prfaas-scheduler`."""

from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from prfaas.console import LogFormatOption, port_option
from prfaas.names import SCHEDULER_METRICS_PORT

HELP = """Move a policy's offload threshold with the measured link: Prometheus in, threshold out.

\b
Example:
  prfaas-scheduler --control-socket /run/prfaas/control.sock --policy kimi --namespace prfaas \\
      --identity kimi-gateway-7d4b9-x2x7q --host 10.244.0.7
"""


class SchedulerOptions(NamedTuple):
    control_socket: Annotated[Path, typer.Option(help="Unix socket of the gateway in this pod.")]
    policy: Annotated[str, typer.Option(help="Name of the PrfaaSPolicy whose status is written.")]
    namespace: Annotated[str, typer.Option(help="Namespace of the policy.")]
    identity: Annotated[str, typer.Option(help="Name of this replica in the Lease: its pod's.")]
    host: Annotated[str, typer.Option(help="Address of the metrics port.")] = "127.0.0.1"
    metrics_port: Annotated[int, port_option("Port of /metrics.", low=0)] = SCHEDULER_METRICS_PORT
    log_format: LogFormatOption = "text"
