"""Makes the decisions of `prfaas serve`, without side effects: checks of flags, commands, routing table and update.

The user's machine is the hub of a tiny installation. Its one decode instance is the local worker. The one prefill
instance of its member cluster is the service. The gateway decides each request by its own rules. Once a second this
process gives it the inputs, in place of a scheduler. The inputs are the profiles of both sides as prices, and whether
the service may be used. Prompts are prefilled here while the service does not answer or a side has no measured profile.
The same holds when the two have different weights.
"""

import ipaddress
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import msgspec

from prfaas.errors import ConfigError
from prfaas.names import HUB
from prfaas.wire.control import Price, ThresholdUpdate
from prfaas.wire.profile import ProfileAnswer
from prfaas.wire.routes import Cluster, Instance, LinkWatermarks, RoutingTable, Threshold

INTERVAL_SECONDS: Final = 1
EXPIRES_SECONDS: Final = 15
"""How long an update holds: longer than two timeouts of a profile."""
NEVER_TOKENS: Final = 1 << 30
"""A threshold that no prompt exceeds."""
MAX_LINK_MBPS: Final = 1_000_000
BUILTIN: Final = "builtin:"
LOCAL: Final = "local"
SERVICE: Final = "service"


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """The command line of `prfaas serve`, checked. `threshold_tokens` None: prices decide."""

    model_source: str
    model_name: str
    service_url: str
    service_cluster: str
    link_mbps: int
    threshold_tokens: int | None
    tls_dir: Path | None
    host: str
    worker_flags: tuple[str, ...] = ()

    @property
    def scheme(self) -> str:
        """The scheme of the worker's and the service's URLs; it is the same for both."""
        return "https" if self.tls_dir else "http"


class Ports(msgspec.Struct, frozen=True, kw_only=True):
    """Ports of the local processes; the worker listens only on 127.0.0.1."""

    gateway: int
    api: int
    data: int


def check_service_url(given: str, inside_tls: bool) -> str:
    """Return the service's address for a routing table; raises ConfigError unless it is one and fits --tls-dir."""
    try:
        parts = urlsplit(given)
        port = parts.port
    except ValueError as error:
        raise ConfigError(f"--prefill-service {given!r} is not an address: {error}; give https://HOST:PORT") from error
    extra = parts.path.strip("/") or parts.query or parts.fragment or parts.username or parts.password
    if parts.scheme not in ("http", "https") or not parts.hostname or not port or extra:
        raise ConfigError(
            f"--prefill-service {given!r} is not of the form https://HOST:PORT; give the service's API port"
        )
    if parts.scheme == "https" and not inside_tls:
        raise ConfigError(
            f"--prefill-service {given!r} needs TLS with a certificate of ours; "
            "give --tls-dir a directory with tls.crt, tls.key and ca.crt"
        )
    if parts.scheme == "http" and inside_tls:
        raise ConfigError(
            f"--prefill-service {given!r} is plain HTTP, but --tls-dir is given; give https://, or leave --tls-dir out"
        )
    return f"{parts.scheme}://{parts.netloc}"


def check_range(flag: str, given: int, low: int, high: int) -> int:
    """Return a number as it was given. Raises ConfigError where it is out of bounds."""
    if not low <= given <= high:
        raise ConfigError(f"{flag} {given} is not between {low} and {high}; give a number that is")
    return given


def check_host(given: str) -> str:
    """Return the address that the gateway listens on. Raises ConfigError where it is not an IP address."""
    try:
        return str(ipaddress.ip_address(given))
    except ValueError:
        raise ConfigError(f"--host {given!r} is not an IP address; give 127.0.0.1, or 0.0.0.0 for all") from None


def check_cluster(given: str) -> str:
    """Return the service's cluster. Raises ConfigError for our own, which would make the service local."""
    if given in ("", HUB):
        raise ConfigError(f"--service-cluster {given!r} cannot be the service's; give the name in its certificate")
    return given


def name_of(model_source: str) -> str:
    """Return a model's default name in requests. Raises ConfigError where its source has no name."""
    name = model_source.removeprefix(BUILTIN) if model_source.startswith(BUILTIN) else Path(model_source).resolve().name
    if not name:
        raise ConfigError(f"--model {model_source!r} has no name of its own; give --model-name")
    return name


def worker_command(settings: Settings, ports: Ports) -> list[str]:
    command = [sys.executable, "-m", "prfaas_worker", "--model-source", settings.model_source]
    command += ["--model-name", settings.model_name, "--host", "127.0.0.1", "--api-port", str(ports.api)]
    command += ["--data-port", str(ports.data), "--instance", LOCAL, "--cluster", HUB, "--role", "mixed"]
    return [*command, *_tls_flags(settings), *settings.worker_flags]


def gateway_command(settings: Settings, ports: Ports, routes_file: Path, control_socket: Path) -> list[str]:
    command = [sys.executable, "-m", "prfaas_gateway", "--host", settings.host, "--port", str(ports.gateway)]
    command += ["--routes-file", str(routes_file), "--control-socket", str(control_socket)]
    return [*command, *_tls_flags(settings)]


def worker_url(settings: Settings, ports: Ports) -> str:
    return f"{settings.scheme}://127.0.0.1:{ports.api}"


def gateway_url(settings: Settings, ports: Ports) -> str:
    """Return the gateway's address for clients on this machine."""
    address = ipaddress.ip_address(settings.host)
    if address.is_unspecified:
        address = ipaddress.ip_address("127.0.0.1" if address.version == 4 else "::1")
    return f"http://{f'[{address}]' if address.version == 6 else address}:{ports.gateway}"


def routing_table(settings: Settings, ports: Ports) -> RoutingTable:
    tokens = NEVER_TOKENS if settings.threshold_tokens is None else settings.threshold_tokens
    mode = "Priced" if settings.threshold_tokens is None else "Fixed"
    service = Cluster(name=settings.service_cluster, capacity_mbps=settings.link_mbps, utilisation_query="")
    return RoutingTable(
        policy="serve",
        namespace=LOCAL,
        generation=1,
        model=settings.model_name,
        on_offload_failure="PrefillLocally",
        threshold=Threshold(mode=mode, tokens=tokens, min_tokens=tokens, max_tokens=tokens),
        watermarks=LinkWatermarks(high_percent=80, low_percent=50),
        short_interval_seconds=INTERVAL_SECONDS,
        clusters=(service,),
        instances=(
            Instance(name=LOCAL, pool=LOCAL, cluster=HUB, role="decode", url=worker_url(settings, ports)),
            Instance(name=SERVICE, pool=SERVICE, cluster=service.name, role="prefill", url=settings.service_url),
        ),
    )


def refusal(settings: Settings, local: ProfileAnswer | None, remote: ProfileAnswer) -> str:
    """Return why a service that answers cannot be used; empty where it can."""
    if remote.model != settings.model_name:
        return (
            f"it serves the model {remote.model!r}, not {settings.model_name!r}: give --model-name, or another service"
        )
    if local is None:
        return "the local worker did not report its weights"
    if local.fingerprint != remote.fingerprint:
        return f"its {remote.model!r} has other weights than ours: its caches would mean nothing here"
    if settings.threshold_tokens is None and not (local.prefill.samples and remote.prefill.samples):
        whose = "it has" if local.prefill.samples else "the local worker has"
        return f"{whose} measured no prefill yet, so no price is known; --threshold-tokens needs none"
    return ""


def update_of(
    settings: Settings, local: ProfileAnswer | None, remote: ProfileAnswer | None, problem: str
) -> ThresholdUpdate:
    """Return the gateway's update; a non-empty `problem` is why the service is not used."""
    usable = local is not None and remote is not None and not problem
    prices: tuple[Price, ...] = ()
    if local is not None and remote is not None and usable:
        link_mbps = float(settings.link_mbps)
        service = Price(cluster=settings.service_cluster, profile=remote.profile, link_mbps=link_mbps)
        prices = (Price(cluster=HUB, profile=local.profile), service)
    return ThresholdUpdate(
        tokens=NEVER_TOKENS if settings.threshold_tokens is None else settings.threshold_tokens,
        bandwidth="Scarce",
        offload_clusters=(settings.service_cluster,) if usable else (),
        expires_seconds=EXPIRES_SECONDS,
        reason="the service may be used" if usable else f"the service is left out: {problem}",
        prices=prices,
    )


def _tls_flags(settings: Settings) -> Sequence[str]:
    return ["--tls-dir", str(settings.tls_dir)] if settings.tls_dir else []
