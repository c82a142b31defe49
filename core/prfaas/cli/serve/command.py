"""`prfaas serve`: decodes on this machine, and sends long prefills to a service elsewhere."""

import signal
import threading
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer

from prfaas.cli.serve.plan import (
    MAX_LINK_MBPS,
    NEVER_TOKENS,
    Ports,
    Settings,
    check_cluster,
    check_host,
    check_range,
    check_service_url,
    name_of,
)
from prfaas.errors import ConfigError
from prfaas.names import GATEWAY_PORT, HUB
from prfaas.ports import free_ports


def serve(  # noqa: PLR0913, PLR0917  # a command line has one parameter a flag
    model: Annotated[str, typer.Option(help="Model directory, or builtin:NAME.", metavar="SOURCE")],
    prefill_service: Annotated[
        str, typer.Option(help="API address of the service that long prompts go to.", metavar="https://HOST:PORT")
    ],
    tls_dir: Annotated[
        Path | None, typer.Option(help="Directory with tls.crt, tls.key and ca.crt of cluster hub (plain).")
    ] = None,
    service_cluster: Annotated[str, typer.Option(help="The cluster in the service's certificate.")] = "service",
    model_name: Annotated[
        str, typer.Option(help="The model's name in requests and at the service (the source's own name).")
    ] = "",
    link_mbps: Annotated[int, typer.Option(help="Bandwidth from the service to this machine, Mbit/s.")] = 100,
    threshold_tokens: Annotated[
        int | None, typer.Option(help="Offload every longer prompt (by default, those with a lower measured price).")
    ] = None,
    host: Annotated[str, typer.Option(help="Address to serve on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to serve on; 0: any free one.")] = GATEWAY_PORT,
    worker_flags: Annotated[
        list[str] | None, typer.Argument(metavar="[-- WORKER FLAGS]", help="Further flags of prfaas-worker.")
    ] = None,
) -> None:
    """Serve a model here, and send long prompts to a prefill service while it answers.

    Example: prfaas serve --model ./kimi-linear --prefill-service https://prefill.example:8000 --tls-dir hub
    """
    settings = Settings(
        model_source=model,
        model_name=model_name or name_of(model),
        service_url=check_service_url(prefill_service, tls_dir is not None),
        service_cluster=check_cluster(service_cluster),
        link_mbps=check_range("--link-mbps", link_mbps, 1, MAX_LINK_MBPS),
        threshold_tokens=None
        if threshold_tokens is None
        else check_range("--threshold-tokens", threshold_tokens, 0, NEVER_TOKENS),
        tls_dir=tls_dir,
        host=check_host(host),
        worker_flags=tuple(worker_flags or ()),
    )
    from prfaas.cli.serve.run import Caller, Serving  # cryptography takes longer to load than all other commands

    caller = Caller(tls_dir)
    if caller.cluster not in ("", HUB):
        raise ConfigError(
            f"--tls-dir {tls_dir} is of cluster {caller.cluster!r}; this machine is {HUB!r}: "
            f"issue one with `prfaas certs issue --cluster {HUB}`"
        )
    ports = _ports(settings.host, check_range("--port", port, 0, 65535))
    with _stopping() as stop:
        Serving(settings, ports, caller, lambda line: typer.echo(line, err=True)).run(stop)


def _ports(host: str, port: int) -> Ports:
    """Return free ports to listen on. Raises ConfigError where `host` is not this machine's."""
    api, data = free_ports(2)
    try:
        return Ports(gateway=port or free_ports(1, host)[0], api=api, data=data)
    except OSError as error:
        raise ConfigError(f"--host {host!r} cannot be listened on: {error.strerror}; give 127.0.0.1") from error


@contextmanager
def _stopping() -> Generator[threading.Event]:
    """Yield an event that Ctrl-C and SIGTERM set; a second Ctrl-C does not wait for requests."""
    stop = threading.Event()

    def ask(number: int, _frame: FrameType | None) -> None:
        if stop.is_set() and number == signal.SIGINT:
            raise KeyboardInterrupt
        stop.set()

    before = [(number, signal.signal(number, ask)) for number in (signal.SIGINT, signal.SIGTERM)]
    try:
        yield stop
    finally:
        for number, handler in before:
            signal.signal(number, handler)
