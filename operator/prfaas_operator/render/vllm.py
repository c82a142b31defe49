"""Containers of vLLM, with our connector, NIXL's or Mooncake's.

Our connector is not part of vLLM's image. An init container copies it from an image of ours into a volume, and
PYTHONPATH leads to it. So a stock image of vLLM serves, and nobody rebuilds it. A second init container runs in vLLM's
image: there the connector looks which version that is, and leaves a sentence about an untested one in the pod's status.

The connector uses the cluster's certificate on its data ports, where caches and cache events cross, and the same
certificate puts vLLM's API inside TLS. With the other connectors vLLM publishes its cache events itself, in clear.
"""

import json
from typing import Any, Final

from prfaas import names
from prfaas.api import PrefillPool
from prfaas.api.engine import Transfer
from prfaas.api.template import Resources
from prfaas_operator.clusters.kinds import Object
from prfaas_operator.plan.pod_facts import VERSION_CONTAINER
from prfaas_operator.plan.pool_status import PoolObject, role_of
from prfaas_operator.render import common
from prfaas_operator.render.certificates import PATH as TLS_PATH
from prfaas_operator.render.launch import (
    Start,
    StartTerms,
    cache_events,
    event_ports,
    gpus,
    json_values,
    parallel_flags,
)

UCX_TCP: Final = {"UCX_TLS": "tcp,cuda_copy,self,sm"}
"""TCP between hosts. UCX reads GPU memory by cuda_copy, and skips it where there is no GPU."""
CONNECTOR_VOLUME: Final = "prfaas-connector"
CONNECTOR_PATH: Final = "/prfaas-vllm"
_COPY_PATH: Final = "/prfaas-copy"
_MOUNT: Final[Object] = {"name": CONNECTOR_VOLUME, "mountPath": CONNECTOR_PATH, "readOnly": True}
CONNECTOR_DEFAULTS: Final = Resources(requests={"cpu": "50m", "memory": "64Mi"}, limits={"cpu": "1", "memory": "256Mi"})
"""The init containers copy or read some files. They request no more CPU than the worker: the larger request counts."""
_TELL: Final = "python3 -c 'from prfaas_vllm.capabilities import tell; tell()' || :"
"""It tells alone: an image in which it cannot run still serves. What the connector lacks, vLLM itself says at start."""
_ROLES: Final = {"prefill": "kv_producer", "decode": "kv_consumer"}
_FAILURE_POLICIES: Final = {"Recompute": "recompute", "Fail": "fail"}
_TLS_COPY: Final = f"{common.SHM_PATH}/prfaas-tls"
_TLS_ARGS: Final = (
    "--ssl-certfile",
    f"{_TLS_COPY}/{names.TLS_CERT}",
    "--ssl-keyfile",
    f"{_TLS_COPY}/{names.TLS_KEY}",
    "--ssl-ca-certs",
    f"{_TLS_COPY}/{names.TLS_TRUSTED}",
    "--enable-ssl-refresh",
)
_COPY_AND_SERVE: Final = f"""\
copy() (umask 077; mkdir -p {_TLS_COPY}; for file in {names.TLS_KEY} {names.TLS_CERT} {names.TLS_TRUSTED}; do
  cmp -s {TLS_PATH}/$file {_TLS_COPY}/$file || cat {TLS_PATH}/$file > {_TLS_COPY}/$file; done)
copy; (while sleep 10; do copy; done) & exec vllm "$@"
"""
"""vLLM follows its certificate's files. The kubelet replaces their folder, after which vLLM hears of no second change:
run with vLLM 0.32's watcher. So vLLM gets copies that are written in place, in memory: a key belongs on no disk.
"""


_EVENTS_BY_MOVER: Final = {"enable_kv_cache_events": True, "publisher": "null"}
"""vLLM itself publishes nothing; our connector then gives the events to its mover."""


def metrics_port(pool: PoolObject) -> int:
    """Return the port of our connector's metrics: the first after the data ports of all ranks."""
    return names.WORKER_DATA_PORT + gpus(pool)


def start_with_ours(pool: PoolObject, terms: StartTerms) -> Start:
    """Return how an instance of vLLM with our connector starts."""
    transfer = _transfer_of(pool)
    extra: dict[str, Any] = {
        "host": "$(POD_IP)",
        "cluster": pool.spec.cluster_name or names.HUB,
        "metrics_port": metrics_port(pool),
        "movers": gpus(pool),
        **json_values(transfer.extra_config),
    }
    if terms.tls:
        extra["tls_dir"] = TLS_PATH
    if isinstance(pool, PrefillPool):
        extra["egress_file"] = common.EGRESS_FILE
    connector = {
        "kv_connector": "PrfaasConnector",
        "kv_connector_module_path": "prfaas_vllm.connector",
        # Either role: the gateway says in each request which one this leg has.
        "kv_role": "kv_both",
        "kv_port": names.WORKER_DATA_PORT,
        **_failure_policy(transfer),
        "kv_connector_extra_config": extra,
    }
    data_ports = {f"data-{rank}" if rank else "data": names.WORKER_DATA_PORT + rank for rank in range(gpus(pool))}
    ports = {"api": names.WORKER_API_PORT, **data_ports, "link-metrics": metrics_port(pool)}
    plain = _start(pool, connector, {}, ports, _EVENTS_BY_MOVER)
    if terms.tls:
        serve = plain.command[1:]
        # The last word is the shell's $0, so that "$@" begins with `serve`.
        plain = plain._replace(command=["/bin/sh", "-c", _COPY_AND_SERVE, "vllm"], args=[*serve, *plain.args])
    return plain._replace(
        tls_args=_TLS_ARGS,
        volumes=({"name": CONNECTOR_VOLUME, "emptyDir": {}},),
        mounts=(_MOUNT,),
        init_containers=(_copy(terms.connector_image, pool), _version(pool)),
        python_path=CONNECTOR_PATH,
    )


def _copy(image: str, pool: PoolObject) -> Object:
    """Return the init container that copies our connector into the volume."""
    return {
        "name": "connector",
        "image": image,
        "command": ["cp", "-r", f"{CONNECTOR_PATH}/.", _COPY_PATH],
        **common.resources(pool.spec.template.connector_resources, CONNECTOR_DEFAULTS),
        "securityContext": common.CONTAINER_SECURITY,
        "volumeMounts": [{"name": CONNECTOR_VOLUME, "mountPath": _COPY_PATH}],
    }


def _version(pool: PoolObject) -> Object:
    """Return the init container that leaves a sentence about an untested version of vLLM in the pod's status."""
    return {
        "name": VERSION_CONTAINER,
        "image": pool.spec.engine.image,
        "command": ["/bin/sh", "-c", _TELL],
        "env": [{"name": "PYTHONPATH", "value": CONNECTOR_PATH}],
        **common.resources(pool.spec.template.connector_resources, CONNECTOR_DEFAULTS),
        "securityContext": common.CONTAINER_SECURITY,
        "volumeMounts": [_MOUNT],
    }


def start_with_nixl(pool: PoolObject, _: StartTerms) -> Start:
    """Return how an instance of vLLM with NixlConnector starts."""
    transfer = _transfer_of(pool)
    connector: dict[str, Any] = {"kv_connector": "NixlConnector", "kv_role": "kv_both", **_failure_policy(transfer)}
    if transfer.extra_config:
        connector["kv_connector_extra_config"] = json_values(transfer.extra_config)
    variables = {
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "$(POD_IP)",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(names.SIDE_CHANNEL_PORT),
        # Hybrid models: linear states cross in the layout that both sides can split.
        "VLLM_SSM_CONV_STATE_LAYOUT": "DS",
        **({} if transfer.protocol == "Rdma" else UCX_TCP),
    }
    ports = {**event_ports(pool), "side-channel": names.SIDE_CHANNEL_PORT}
    return _start(pool, connector, variables, ports, _events_over_zmq(pool))


def start_with_mooncake(pool: PoolObject, _: StartTerms) -> Start:
    """Return how an instance of vLLM with MooncakeConnector starts."""
    transfer = _transfer_of(pool)
    protocol = "rdma" if transfer.protocol == "Rdma" else "tcp"
    connector = {
        "kv_connector": "MooncakeConnector",
        "kv_role": _ROLES[role_of(pool)],
        **_failure_policy(transfer),
        "kv_connector_extra_config": {"mooncake_protocol": protocol, **json_values(transfer.extra_config)},
    }
    variables = {"VLLM_MOONCAKE_BOOTSTRAP_PORT": str(names.BOOTSTRAP_PORT)}
    ports = {**event_ports(pool), "bootstrap": names.BOOTSTRAP_PORT}
    return _start(pool, connector, variables, ports, _events_over_zmq(pool))


def _transfer_of(pool: PoolObject) -> Transfer:
    return pool.spec.engine.transfer or Transfer()


def _failure_policy(transfer: Transfer) -> dict[str, str]:
    """Return vLLM's own answer to a cache that did not arrive; its default would fail the request."""
    return {"kv_load_failure_policy": _FAILURE_POLICIES[transfer.failure_policy or "Recompute"]}


def _events_over_zmq(pool: PoolObject) -> dict[str, Any]:
    return {"enable_kv_cache_events": True, **cache_events(pool)}


def _start(
    pool: PoolObject,
    connector: dict[str, Any],
    variables: dict[str, str],
    ports: dict[str, int],
    events: dict[str, Any],
) -> Start:
    spec = pool.spec
    flags = {
        "--served-model-name": spec.model.name,
        "--host": "$(POD_IP)",
        "--port": str(names.WORKER_API_PORT),
        "--shutdown-timeout": str(spec.drain_seconds),  # by default vLLM aborts all requests at once
        "--kv-events-config": json.dumps(events),
        "--kv-transfer-config": json.dumps(connector),
        **parallel_flags(pool),
    }
    return Start(["vllm", "serve", spec.model.source], [*common.words(flags), *spec.engine.args], variables, ports)
