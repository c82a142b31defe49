"""The form in which every engine says how its container starts, and the parts that several engines share."""

import json
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from prfaas import names
from prfaas_operator.clusters.kinds import Object
from prfaas_operator.plan.pool_status import PoolObject


class StartTerms(NamedTuple):
    """What the operator decides about a pool's instances beside the pool's own spec.

    Args:
        connector_image: with our connector for vLLM.
        worker_image: of our own worker, where a pool names none.
        tls: the instances get their cluster's certificate.
    """

    connector_image: str = ""
    worker_image: str = ""
    tls: bool = False


DEFAULT_TERMS: Final = StartTerms()


class Start(NamedTuple):
    """The fields of a pod that differ between engines.

    Args:
        env: variables; one of the pool's owner replaces the one of the same name.
        health_path: path of all probes; empty for our own worker, which has two at a port of their own.
        tls_args: flags that put the API inside TLS, for an instance with a certificate; none if the engine has none.
        volumes, mounts: of the container.
        init_containers: that end before the container starts.
        python_path: folder that comes before the owner's PYTHONPATH; empty if there is none.
        image: of the container, where the pool names none.
    """

    command: list[str]
    args: list[str]
    env: dict[str, str]
    ports: dict[str, int]
    health_path: str = "/health"
    tls_args: tuple[str, ...] = ()
    volumes: tuple[Object, ...] = ()
    mounts: tuple[Object, ...] = ()
    init_containers: tuple[Object, ...] = ()
    python_path: str = ""
    image: str = ""


def data_ranks(pool: PoolObject) -> int:
    """Return how many copies of the model an instance has; each has a cache and cache events of its own."""
    return pool.spec.parallelism.data if pool.spec.parallelism else 1


def gpus(pool: PoolObject) -> int:
    """Return how many GPUs an instance uses; each runs one rank."""
    return pool.spec.parallelism.gpus if pool.spec.parallelism else 1


def parallel_flags(pool: PoolObject) -> dict[str, str]:
    """Return the flags of vLLM and SGLang for the pool's parallelism, none for sizes of 1."""
    sizes = pool.spec.parallelism.model_dump() if pool.spec.parallelism else {}
    return {f"--{name}-parallel-size": str(size) for name, size in sizes.items() if size > 1}


def cache_events(pool: PoolObject) -> dict[str, str]:
    """Return the settings of cache events over ZMQ. Engines add a data-parallel rank's number to both ports."""
    return {
        "publisher": "zmq",
        "endpoint": f"tcp://*:{names.KV_EVENTS_PORT}",
        "replay_endpoint": f"tcp://*:{names.kv_log_port(data_ranks(pool))}",
        "topic": f"kv@$(POD_NAME)@{pool.spec.model.name}",
    }


def event_ports(pool: PoolObject) -> dict[str, int]:
    """Return the API port and those of cache events, by name."""
    ranks = data_ranks(pool)
    first = {"kv-events": names.KV_EVENTS_PORT, "kv-replay": names.kv_log_port(ranks)}
    more = {f"{name}-{rank}": port + rank for rank in range(1, ranks) for name, port in first.items()}
    return {"api": names.WORKER_API_PORT, **first, **more}


def json_values(texts: Mapping[str, str]) -> dict[str, Any]:
    """Return entries of an extra config; a text that is JSON becomes its value, as in true or 4."""
    return {key: _json_value(text) for key, text in texts.items()}


def _json_value(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):  # no JSON, or none that anybody could read
        return text
