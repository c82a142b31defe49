"""The `prfaas-gateway` command."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import uvloop

from prfaas.errors import ConfigError, PrfaasError
from prfaas.names import GATEWAY_PORT
from prfaas.telemetry.logs import configure_logs
from prfaas_gateway.server import GatewayConfig, run

EXAMPLES = """examples:
  prfaas-gateway --routes-file routes.json
  prfaas-gateway --host "$POD_IP" --policy kimi --namespace prfaas --control-socket /run/prfaas/control.sock
"""


def parse(arguments: Sequence[str] | None) -> GatewayConfig:
    """Read the command line; a mistake ends the process with exit code 2."""
    parser = argparse.ArgumentParser(
        prog="prfaas-gateway",
        description="OpenAI front door of one policy: sends long prompts to be prefilled in another cluster.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=_port, default=GATEWAY_PORT, help="port to listen on (default: %(default)s)")
    parser.add_argument("--policy", default="", help="PrfaaSPolicy whose routing table is watched")
    parser.add_argument("--namespace", default="", help="namespace of the policy")
    parser.add_argument(
        "--routes-file", type=Path, help="routing table in a file, JSON or gzip JSON; reread when it changes"
    )
    parser.add_argument("--control-socket", type=Path, help="unix socket for the scheduler sidecar")
    parser.add_argument(
        "--tls-dir",
        type=Path,
        help="directory with tls.crt, tls.key and ca.crt for workers inside TLS; reread when it changes",
    )
    parser.add_argument(
        "--keys-dir",
        type=Path,
        help="directory of API keys, a file a client, as a mounted Secret is one; reread when it changes "
        "(default: anybody may ask)",
    )
    parser.add_argument(
        "--drain-seconds", type=_seconds, default=30.0, help="wait this long for requests on SIGTERM (default: 30)"
    )
    known = parser.parse_args(arguments)
    if (known.routes_file is None) == (not known.policy):
        parser.error("give either --routes-file, or --policy with --namespace")
    if known.policy and not known.namespace:
        parser.error("--policy needs --namespace")
    return GatewayConfig(**vars(known))


def _port(text: str) -> int:
    port = int(text)
    if not 0 <= port <= 65535:
        raise argparse.ArgumentTypeError(f"{port} is no port: use 1 to 65535, or 0 for any free one")
    return port


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 <= seconds <= 86_400:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and 86400 seconds")
    return seconds


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the gateway; our own errors end in one sentence, with exit code 2 where the command line is at fault."""
    config = parse(arguments)
    try:
        configure_logs(f"gateway {config.policy}".strip())
        uvloop.run(run(config))
    except* PrfaasError as group:
        for error in group.exceptions:
            sys.stderr.write(f"prfaas-gateway: {error}\n")
        sys.exit(2 if group.subgroup(ConfigError) else 1)


if __name__ == "__main__":
    main()
