"""`prfaas contract`: whether an engine, or a pair of them, keeps what prfaas needs, found out over HTTP."""

import os
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from prfaas.cli.contract.calls import CheckedEngine
from prfaas.cli.contract.checks import ALONE, PAIR, EnginePair
from prfaas.cli.measured_server import KEY_VARIABLE
from prfaas.console import TextOrJson, echo_json
from prfaas.errors import ConfigError, PrfaasError
from prfaas.names import WORKER_DATA_PORT


def contract(
    url: Annotated[list[str], typer.Option(help="An engine; repeat it for a pair: the source, then the destination.")],
    data_port: Annotated[int, typer.Option(min=1, max=65_535, help="The source's port for caches.")] = WORKER_DATA_PORT,
    data_host: Annotated[str, typer.Option(help="The source's host for caches; that of its URL if not given.")] = "",
    ca: Annotated[Path | None, typer.Option(help="Authority of the certificates.", show_default=False)] = None,
    tls_dir: Annotated[
        Path | None,
        typer.Option(help="Directory with the hub's certificate, which instances inside TLS want.", show_default=False),
    ] = None,
    output: TextOrJson = "text",
) -> None:
    """Check what prfaas needs of an engine. Example: prfaas contract --url http://10.0.0.5:8000.

    A pair: prfaas contract --url http://10.0.0.5:8000 --url http://10.0.0.6:8000.
    The exit code is 1 if a check fails. Use idle engines: what others ask of them counts as held. A key stands in
    PRFAAS_API_KEY.
    """
    if len(url) > 2 or len(set(url)) < len(url):
        raise ConfigError(f"--url is {' and '.join(url)}: give one engine, or a source and another as destination")
    engines = [CheckedEngine(one, ca, os.environ.get(KEY_VARIABLE) or None, tls_dir) for one in url]
    checks = [(f"{one.url} {claim}", partial(check, one)) for one in engines for claim, check in ALONE.items()]
    if len(engines) == 2:
        both = EnginePair(engines[0], engines[1], data_port, data_host=data_host)
        checks += [(f"the pair {claim}", partial(check, both)) for claim, check in PAIR.items()]
    found: list[dict[str, Any]] = []
    for claim, check in checks:
        try:
            found.append({"check": claim, "holds": True, "seen": check()})
        except PrfaasError as error:
            found.append({"check": claim, "holds": False, "seen": str(error)})
        except (AttributeError, LookupError, TypeError, ValueError) as error:  # anything may stand in an answer
            found.append({"check": claim, "holds": False, "seen": f"an answer has another form: {error!r}"})
        if output == "text":
            typer.echo(f"{'ok  ' if found[-1]['holds'] else 'FAIL'}  {claim}: {found[-1]['seen']}")
    if output == "json":
        echo_json(found)
    raise typer.Exit(0 if all(one["holds"] for one in found) else 1)
