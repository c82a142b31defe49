"""`prfaas serve`: decodes on this machine, and sends long prefills to a service elsewhere."""

from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

import typer

from prfaas.cli.serve.plan import NEVER_TOKENS, Settings
from prfaas.errors import ConfigError
from prfaas.names import GATEWAY_PORT, HUB, WORKER_DATA_PORT
from prfaas.ports import free_ports


def serve(  # noqa: PLR0913, PLR0917  # a command line has one parameter a flag
    prefill_service: Annotated[str, typer.Option(help="API address of the service.", metavar="https://HOST:PORT")],
    model: Annotated[str, typer.Option(help="Model directory, or builtin:NAME.", metavar="SOURCE")] = "",
    decode_url: Annotated[
        str, typer.Option(help="A vLLM here with our connector, instead of a worker.", metavar="http://HOST:PORT")
    ] = "",
    tls_dir: Annotated[Path | None, typer.Option(help="Directory with a buyer's certificate (plain).")] = None,
    service_cluster: Annotated[str, typer.Option(help="The cluster in the service's certificate.")] = "service",
    service_data_port: Annotated[
        int, typer.Option(min=1, max=65535, help="The service's port of cache transfers.")
    ] = WORKER_DATA_PORT,
    model_name: Annotated[str, typer.Option(help="The model's name on both sides (the source's own name).")] = "",
    link_mbps: Annotated[int, typer.Option(min=1, help="Bandwidth from the service to this machine, Mbit/s.")] = 100,
    threshold_tokens: Annotated[int | None, typer.Option(min=0, help="Offload what is longer (else by price).")] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to serve on; 0: any free one.")] = GATEWAY_PORT,
    flags: Annotated[list[str] | None, typer.Argument(metavar="[-- FLAGS]", help="Flags of prfaas-worker.")] = None,
) -> None:
    """Serve a model here, and send long prompts to a prefill service while it answers.

    Example: prfaas serve --model ./kimi-linear --prefill-service https://prefill.example:8000 --tls-dir acme
    """
    if bool(model) == bool(decode_url):
        raise ConfigError("give either --model, for a worker that this command runs, or --decode-url, for a vLLM")
    if decode_url and flags:
        raise ConfigError(f"--decode-url: no worker runs here to take {' '.join(flags)}; give them to that vLLM")
    if decode_url and threshold_tokens is None:
        raise ConfigError("--decode-url: vLLM measures no prefills, so no price is known; give --threshold-tokens")
    name = model_name or (Path(model.removeprefix("builtin:")).resolve().name if model else "")
    if not name:
        given = f"--model {model!r}" if model else f"--decode-url {decode_url!r}"
        raise ConfigError(f"{given} has no name of its own; give --model-name")
    if service_cluster in ("", HUB):  # the service would count as local
        raise ConfigError(f"--service-cluster {service_cluster!r} is ours; give the name in the service's certificate")
    api_port, data_port, any_port = free_ports(3)
    settings = Settings(
        model_source=model,
        model_name=name,
        decode_url=decode_url and check_url("--decode-url", decode_url, tls_dir is not None),
        service_url=check_url("--prefill-service", prefill_service, tls_dir is not None),
        service_data_port=service_data_port,
        service_cluster=service_cluster,
        link_mbps=link_mbps,
        threshold_tokens=NEVER_TOKENS if threshold_tokens is None else threshold_tokens,
        tls_dir=tls_dir,
        port=port or any_port,
        api_port=api_port,
        data_port=data_port,
        worker_flags=tuple(flags or ()),
    )
    from prfaas.cli.serve.run import Caller, run  # cryptography takes longer to load than all other commands

    run(settings, Caller(tls_dir))


def check_url(flag: str, text: str, inside_tls: bool) -> str:
    """Return an instance's address for a routing table; raises ConfigError unless it is one and fits --tls-dir."""
    url = text.rstrip("/")
    try:
        parts = urlsplit(url)
        fits = parts.hostname and parts.port and url in (f"http://{parts.netloc}", f"https://{parts.netloc}")
    except ValueError:
        fits = False
    if not fits or "@" in url:
        raise ConfigError(f"{flag} {text!r} is not of the form https://HOST:PORT; give its API port")
    if url.startswith("https:") != inside_tls:
        raise ConfigError(f"{flag} {text!r}: https:// needs --tls-dir, and http:// takes none")
    return url
