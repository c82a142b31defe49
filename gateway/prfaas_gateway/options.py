"""The flags of `prfaas-gateway`, checked before anything starts."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from prfaas.console import LogFormatOption, port_option, read_options, refuse, seconds_up_to
from prfaas.names import GATEWAY_ADMIN_PORT, GATEWAY_PORT, ORIGIN
from prfaas_gateway.limits import Limits

HELP = """Serve the OpenAI API of one policy; long prompts are prefilled in another cluster.

\b
Examples:
  prfaas-gateway --routes-file routes.json
  prfaas-gateway --host "$POD_IP" --policy kimi --namespace prfaas --control-socket /run/prfaas/control.sock
"""


class GatewayOptions(NamedTuple):
    """The flags. The table comes from `routes_file`, or else from `policy` in `namespace`."""

    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1"
    port: Annotated[int, port_option("Port to listen on; 0: any free one.", low=0)] = GATEWAY_PORT
    admin_port: Annotated[
        int, port_option("Port of probes, /metrics and the live page /ui; 0: any free one.", low=0)
    ] = GATEWAY_ADMIN_PORT
    policy: Annotated[str, typer.Option(help="PrfaaSPolicy with the routing table to watch.")] = ""
    namespace: Annotated[str, typer.Option(help="Namespace of the policy.")] = ""
    routes_file: Annotated[
        Path | None, typer.Option(help="Routing table in a file, JSON or gzip JSON; reread when it changes.")
    ] = None
    control_socket: Annotated[Path | None, typer.Option(help="Unix socket for the scheduler sidecar.")] = None
    tls_dir: Annotated[
        Path | None,
        typer.Option(help="Directory with tls.crt, tls.key and ca.crt for workers with TLS; reread when it changes."),
    ] = None
    keys_dir: Annotated[
        Path | None,
        typer.Option(
            help="Directory of API keys, one file a client, as a mounted Secret is; reread when it changes. Without "
            "it no key is required."
        ),
    ] = None
    shared_cache: Annotated[
        bool,
        typer.Option(
            help="Let clients of different keys share what is cached of their prompts. Each then learns by the time to "
            "the first token what others sent."
        ),
    ] = False
    cors_origins: Annotated[
        str,
        typer.Option(
            metavar="ORIGINS",
            show_default="none",
            help="Origins whose pages may call from a browser, with commas between, as https://chat.example; *: all.",
        ),
    ] = ""
    drain_seconds: Annotated[
        float, typer.Option(parser=seconds_up_to(86_400), metavar="N", help="Time to finish requests after SIGTERM.")
    ] = 30.0
    log_format: LogFormatOption = "text"
    limits: Limits = Limits()

    @property
    def origins(self) -> frozenset[str]:
        """The origins of `cors_origins`."""
        return frozenset(filter(None, (one.strip() for one in self.cors_origins.split(","))))


def parse(arguments: Sequence[str] | None = None) -> GatewayOptions:
    """Read the command line; exit with 2 after a mistake."""
    options = read_options(GatewayOptions, "prfaas-gateway", HELP, arguments)
    if (options.routes_file is None) == (not options.policy):
        refuse("prfaas-gateway", "give either --routes-file, or --policy with --namespace")
    if options.policy and not options.namespace:
        refuse("prfaas-gateway", "--policy needs --namespace")
    if wrong := [one for one in options.origins if not re.fullmatch(ORIGIN, one)]:
        text = f"--cors-origins has {wrong[0]!r}: want *, or an origin without a path, such as https://chat.example"
        refuse("prfaas-gateway", text)
    return options
