"""Containers of vLLM and SGLang as instances of a pool: command, flags, variables and ports.

The flags for cache transfers and cache events are set here, under the engines' own documented names; a pool's
`engine.args` come last. Cache events are on, over ZMQ. Caches cross connections that the engines open between
themselves, without our data port and our certificates.
"""

import json
from typing import Final, NamedTuple

from prfaas import names
from prfaas_operator.plan.pool_status import Pool, engine_name, role_of
from prfaas_operator.render.common import Manifest

REPLAY_PORT: Final = names.KV_EVENTS_PORT + 1
SHM_VOLUME: Final = "prfaas-shm"
HOME: Final = "/tmp"  # noqa: S108  # the one place that a hardened container may write to
_VLLM_ROLES: Final = {"prefill": "kv_producer", "decode": "kv_consumer"}


class Start(NamedTuple):
    """The fields of a container that differ from our own worker's."""

    command: list[str]
    args: list[str]
    env: dict[str, str]
    ports: dict[str, int]
    health_path: str = "/health"


def start(pool: Pool) -> Start:
    return _sglang(pool) if engine_name(pool) == "sglang" else _vllm(pool)


def volumes() -> tuple[list[Manifest], list[Manifest]]:
    """Return volumes and mounts of these engines: memory that their processes share."""
    volume = {"name": SHM_VOLUME, "emptyDir": {"medium": "Memory"}}
    return [volume], [{"name": SHM_VOLUME, "mountPath": "/dev/shm"}]  # noqa: S108


def _vllm(pool: Pool) -> Start:
    spec = pool.spec
    events = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"tcp://*:{names.KV_EVENTS_PORT}",
        "replay_endpoint": f"tcp://*:{REPLAY_PORT}",
        "topic": f"kv@$(POD_NAME)@{spec.model.name}",
    }
    flags = {
        "--served-model-name": spec.model.name,
        "--host": "$(POD_IP)",
        "--port": str(names.WORKER_API_PORT),
        "--kv-events-config": json.dumps(events),
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
        [*_words(flags), *spec.engine.args],
        {"HOME": HOME, **variables},
        {"api": names.WORKER_API_PORT, "kv-events": names.KV_EVENTS_PORT, "kv-replay": REPLAY_PORT, **ports},
    )


def _sglang(pool: Pool) -> Start:
    spec = pool.spec
    events = {
        "publisher": "zmq",
        "endpoint": f"tcp://*:{names.KV_EVENTS_PORT}",
        "replay_endpoint": f"tcp://*:{REPLAY_PORT}",
        "topic": f"kv@$(POD_NAME)@{spec.model.name}",
    }
    flags = {
        "--model-path": spec.model.source,
        "--served-model-name": spec.model.name,
        "--host": "$(POD_IP)",
        "--port": str(names.WORKER_API_PORT),
        "--disaggregation-mode": role_of(pool),
        "--disaggregation-bootstrap-port": str(names.BOOTSTRAP_PORT),
        "--kv-events-config": json.dumps(events),
    }
    return Start(
        ["python3", "-m", "sglang.launch_server"],
        [*_words(flags), "--enable-metrics", *spec.engine.args],
        {"HOME": HOME},
        {
            "api": names.WORKER_API_PORT,
            "kv-events": names.KV_EVENTS_PORT,
            "kv-replay": REPLAY_PORT,
            "bootstrap": names.BOOTSTRAP_PORT,
        },
    )


def _words(flags: dict[str, str]) -> list[str]:
    return [word for flag in flags.items() for word in flag]
