"""Makes the decisions of `prfaas serve`, without side effects: commands, the routing table and the gateway's updates.

The user's machine is the hub of a tiny installation. Its one decode instance is the local worker, or a vLLM with our
connector. The one prefill instance of its member cluster is the service, of the same engine. The gateway decides each
request by its own rules. Once a second this process gives it the inputs, in place of a scheduler. The inputs are the
profiles of both sides as prices, and whether the service may be used. Prompts are prefilled here while the service does
not answer or a side has no measured profile. The same holds when the two have different weights. vLLM has no profile,
so there the length of a prompt decides.
"""

import sys
from pathlib import Path
from typing import Final

import msgspec

from prfaas.engines import find_engine
from prfaas.errors import MismatchError
from prfaas.names import HUB, WORKER_DATA_PORT
from prfaas.util import decode_json
from prfaas.wire.control import Price, ThresholdUpdate
from prfaas.wire.profile import ProfileAnswer
from prfaas.wire.routes import Cluster, EngineName, Instance, LinkWatermarks, RoutingTable, Threshold

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
    decode_url: str = ""
    """The address of a vLLM here; empty for a worker of ours."""
    service_url: str
    service_data_port: int = WORKER_DATA_PORT
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
    def engine(self) -> EngineName:
        kind = ("vllm", "Prfaas") if self.decode_url else ("prfaas", None)
        return find_engine(*kind).name

    @property
    def worker_url(self) -> str:
        return self.decode_url or f"{'https' if self.tls_dir else 'http'}://127.0.0.1:{self.api_port}"

    @property
    def gateway_url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


class _Model(msgspec.Struct, frozen=True):
    id: str


class _Models(msgspec.Struct, frozen=True):
    """The answer of GET /v1/models."""

    data: list[_Model]


def commands(settings: Settings, routes_file: Path, control_socket: Path, home: str = HUB) -> dict[str, list[str]]:
    """Return the commands to start by name, in that order. `home` is what our certificate names."""
    tls = [f"--tls-dir={settings.tls_dir}"] if settings.tls_dir else []
    worker = [f"--model-source={settings.model_source}", f"--model-name={settings.model_name}", f"--instance={LOCAL}"]
    worker += [f"--cluster={home}", f"--api-port={settings.api_port}", f"--data-port={settings.data_port}"]
    worker += ["--admin-port=0", *tls, *settings.worker_flags]
    gateway = [f"--port={settings.port}", "--admin-port=0", f"--routes-file={routes_file}"]
    gateway += [f"--control-socket={control_socket}", *tls]
    ours = {} if settings.decode_url else {"worker": [sys.executable, "-m", "prfaas_worker", *worker]}
    return ours | {"gateway": [sys.executable, "-m", "prfaas_gateway", *gateway]}


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
            Instance(
                name=LOCAL, pool=LOCAL, cluster=HUB, role="decode", url=settings.worker_url, engine=settings.engine
            ),
            Instance(
                name="service",
                pool="service",
                cluster=member,
                role="prefill",
                url=settings.service_url,
                engine=settings.engine,
                data_port=settings.service_data_port,
            ),
        ),
    )


def prices_of(settings: Settings, local: ProfileAnswer, remote: ProfileAnswer) -> tuple[Price, ...]:
    """Return the prices of both sides. Raises MismatchError, which says why the service cannot be used."""
    _require_model(settings, remote.model)
    if local.fingerprint != remote.fingerprint:
        raise MismatchError(f"its {remote.model!r} has other weights than ours: its caches would mean nothing here")
    if settings.threshold_tokens == NEVER_TOKENS and not (local.prefill.samples and remote.prefill.samples):
        whose = "it has" if local.prefill.samples else "the local worker has"
        raise MismatchError(f"{whose} measured no prefill yet, so no price is known; --threshold-tokens needs none")
    away = Price(cluster=settings.service_cluster, profile=remote.profile, link_mbps=float(settings.link_mbps))
    return Price(cluster=HUB, profile=local.profile), away


def require_listed_model(settings: Settings, models: bytes) -> None:
    """Raise PeerError unless this answer to GET /v1/models has the model first."""
    listed = decode_json(models, _Models, "the answer to /v1/models is no list of models").data
    _require_model(settings, listed[0].id if listed else "")


def _require_model(settings: Settings, found: str) -> None:
    if found != settings.model_name:
        raise MismatchError(f"it serves the model {found!r}, not {settings.model_name!r}: give --model-name")


def update_of(
    settings: Settings, reason: str, *, is_used: bool = True, prices: tuple[Price, ...] = ()
) -> ThresholdUpdate:
    """Return the gateway's update."""
    return ThresholdUpdate(
        tokens=settings.threshold_tokens,
        bandwidth="Scarce",
        offload_clusters=(settings.service_cluster,) if is_used else (),
        expires_seconds=EXPIRES_SECONDS,
        reason=reason,
        prices=prices,
    )
