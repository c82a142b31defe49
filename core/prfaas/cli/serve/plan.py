"""Makes the decisions of `prfaas serve`, without side effects: commands, the routing table and the gateway's updates.

The user's machine is the hub of a tiny installation. Its one decode instance is the local worker. The one prefill
instance of its member cluster is the service. The gateway decides each request by its own rules. Once a second this
process gives it the inputs, in place of a scheduler. The inputs are the profiles of both sides as prices, and whether
the service may be used. Prompts are prefilled here while the service does not answer or a side has no measured profile.
The same holds when the two have different weights.
"""

import sys
from pathlib import Path
from typing import Final

import msgspec

from prfaas.errors import MismatchError
from prfaas.names import HUB
from prfaas.wire.control import Price, ThresholdUpdate
from prfaas.wire.profile import ProfileAnswer
from prfaas.wire.routes import Cluster, Instance, LinkWatermarks, RoutingTable, Threshold

INTERVAL_SECONDS: Final = 1
EXPIRES_SECONDS: Final = 15
"""How long an update holds: longer than two timeouts of a profile."""
NEVER_TOKENS: Final = 1 << 30
"""A threshold that no prompt exceeds, and that holds while no price is known."""
LOCAL: Final = "local"


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """The command line of `prfaas serve`, checked, and the ports that it chose. All listen only on 127.0.0.1."""

    model_source: str
    model_name: str
    service_url: str
    service_cluster: str
    link_mbps: int
    threshold_tokens: int
    """NEVER_TOKENS: prices decide."""
    tls_dir: Path | None
    port: int
    """The gateway's; the next two are the worker's."""
    api_port: int
    data_port: int
    worker_flags: tuple[str, ...] = ()

    @property
    def worker_url(self) -> str:
        return f"{'https' if self.tls_dir else 'http'}://127.0.0.1:{self.api_port}"

    @property
    def gateway_url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


def commands(settings: Settings, routes_file: Path, control_socket: Path) -> dict[str, list[str]]:
    """Return the commands to start by name, in that order."""
    tls = [f"--tls-dir={settings.tls_dir}"] if settings.tls_dir else []
    worker = [f"--model-source={settings.model_source}", f"--model-name={settings.model_name}", f"--instance={LOCAL}"]
    worker += [f"--api-port={settings.api_port}", f"--data-port={settings.data_port}", *tls, *settings.worker_flags]
    gateway = [f"--port={settings.port}", f"--routes-file={routes_file}", f"--control-socket={control_socket}", *tls]
    return {
        "worker": [sys.executable, "-m", "prfaas_worker", *worker],
        "gateway": [sys.executable, "-m", "prfaas_gateway", *gateway],
    }


def routing_table(settings: Settings) -> RoutingTable:
    tokens, member = settings.threshold_tokens, settings.service_cluster
    mode = "Priced" if settings.threshold_tokens == NEVER_TOKENS else "Fixed"
    return RoutingTable(
        policy="serve",
        namespace=LOCAL,
        generation=1,
        model=settings.model_name,
        on_offload_failure="PrefillLocally",
        threshold=Threshold(mode=mode, tokens=tokens, min_tokens=tokens, max_tokens=tokens),
        watermarks=LinkWatermarks(high_percent=80, low_percent=50),
        short_interval_seconds=INTERVAL_SECONDS,
        clusters=(Cluster(name=member, capacity_mbps=settings.link_mbps, utilisation_query=""),),
        instances=(
            Instance(name=LOCAL, pool=LOCAL, cluster=HUB, role="decode", url=settings.worker_url),
            Instance(name="service", pool="service", cluster=member, role="prefill", url=settings.service_url),
        ),
    )


def prices_of(settings: Settings, local: ProfileAnswer, remote: ProfileAnswer) -> tuple[Price, ...]:
    """Return the prices of both sides. Raises MismatchError, which says why the service cannot be used."""
    if remote.model != settings.model_name:
        raise MismatchError(f"it serves the model {remote.model!r}, not {settings.model_name!r}: give --model-name")
    if local.fingerprint != remote.fingerprint:
        raise MismatchError(f"its {remote.model!r} has other weights than ours: its caches would mean nothing here")
    if settings.threshold_tokens == NEVER_TOKENS and not (local.prefill.samples and remote.prefill.samples):
        whose = "it has" if local.prefill.samples else "the local worker has"
        raise MismatchError(f"{whose} measured no prefill yet, so no price is known; --threshold-tokens needs none")
    away = Price(cluster=settings.service_cluster, profile=remote.profile, link_mbps=float(settings.link_mbps))
    return Price(cluster=HUB, profile=local.profile), away


def update_of(settings: Settings, prices: tuple[Price, ...], reason: str) -> ThresholdUpdate:
    """Return the gateway's update; without prices the service is not used."""
    return ThresholdUpdate(
        tokens=settings.threshold_tokens,
        bandwidth="Scarce",
        offload_clusters=(settings.service_cluster,) if prices else (),
        expires_seconds=EXPIRES_SECONDS,
        reason=reason,
        prices=prices,
    )
