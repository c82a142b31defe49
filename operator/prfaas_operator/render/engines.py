"""Containers of vLLM and SGLang as instances of a pool: command, flags, variables and ports.

The flags for cache transfers and cache events are set here, under the engines' own documented names. A pool's
`engine.args` come last. Cache events are on, over ZMQ. Caches cross connections that the engines open between
themselves, without our data port and our certificates.
"""

import json
from typing import Final, NamedTuple

from prfaas import names
from prfaas_operator.clusters.kinds import Object
from prfaas_operator.plan.pool_status import PoolObject, engine_name, role_of
from prfaas_operator.render.common import TMP_PATH, words

REPLAY_PORT: Final = names.KV_EVENTS_PORT + 1
SHM_VOLUME: Final = "prfaas-shm"
_EVENT_PORTS: Final = {"api": names.WORKER_API_PORT, "kv-events": names.KV_EVENTS_PORT, "kv-replay": REPLAY_PORT}
_VLLM_ROLES: Final = {"prefill": "kv_producer", "decode": "kv_consumer"}


class Start(NamedTuple):
    """The fields of a container that differ from our own worker's."""

    command: list[str]
    args: list[str]
    env: dict[str, str]
    ports: dict[str, int]
    health_path: str = "/health"


def start(pool: PoolObject) -> Start:
    return _sglang(pool) if engine_name(pool) == "sglang" else _vllm(pool)


def volumes() -> tuple[list[Object], list[Object]]:
    """Return volumes and mounts of these engines: memory that their processes share."""
    volume = {"name": SHM_VOLUME, "emptyDir": {"medium": "Memory"}}
    return [volume], [{"name": SHM_VOLUME, "mountPath": "/dev/shm"}]  # noqa: S108


def _vllm(pool: PoolObject) -> Start:
    spec = pool.spec
    flags = {
        "--served-model-name": spec.model.name,
        "--host": "$(POD_IP)",
        "--port": str(names.WORKER_API_PORT),
        "--kv-events-config": json.dumps({"enable_kv_cache_events": True, **_events(pool)}),
    }
    if engine_name(pool) == "vllm-mooncake":
        transfer = {"kv_connector": "MooncakeConnector", "kv_role": _VLLM_ROLES[role_of(pool)]}
        variables = {"VLLM_MOONCAKE_BOOTSTRAP_PORT": str(names.BOOTSTRAP_PORT)}
        ports = {"bootstrap": names.BOOTSTRAP_PORT}
    else:
        transfer = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}
        variables = {
            "VLLM_NIXL_SIDE_CHANNEL_HOST": "$(POD_IP)",
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(names.SIDE_CHANNEL_PORT),
            # Hybrid models: linear states cross in the layout that both sides can split.
            "VLLM_SSM_CONV_STATE_LAYOUT": "DS",
        }
        ports = {"side-channel": names.SIDE_CHANNEL_PORT}
    flags["--kv-transfer-config"] = json.dumps(transfer)
    return Start(
        ["vllm", "serve", spec.model.source],
        [*words(flags), *spec.engine.args],
        {"HOME": TMP_PATH, **variables},
        {**_EVENT_PORTS, **ports},
    )


def _sglang(pool: PoolObject) -> Start:
    spec = pool.spec
    flags = {
        "--model-path": spec.model.source,
        "--served-model-name": spec.model.name,
        "--host": "$(POD_IP)",
        "--port": str(names.WORKER_API_PORT),
        "--disaggregation-mode": role_of(pool),
        "--disaggregation-bootstrap-port": str(names.BOOTSTRAP_PORT),
        "--kv-events-config": json.dumps(_events(pool)),
    }
    return Start(
        ["python3", "-m", "sglang.launch_server"],
        [*words(flags), "--enable-metrics", *spec.engine.args],
        {"HOME": TMP_PATH},
        {**_EVENT_PORTS, "bootstrap": names.BOOTSTRAP_PORT},
    )


def _events(pool: PoolObject) -> dict[str, str]:
    return {
        "publisher": "zmq",
        "endpoint": f"tcp://*:{names.KV_EVENTS_PORT}",
        "replay_endpoint": f"tcp://*:{REPLAY_PORT}",
        "topic": f"kv@$(POD_NAME)@{pool.spec.model.name}",
    }
