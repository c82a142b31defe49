"""Containers of engines as instances of a pool: command, flags, variables and ports.

The flags for cache transfers and cache events are set here, under the engines' own documented names. A pool's
`engine.args` come last. vLLM is in `vllm`. SGLang and TensorRT-LLM transfer caches over connections that they open
between themselves, without our data port and our certificates. Their default is RDMA, which ends at a datacenter's
border, so TCP is rendered unless a pool asks for RDMA.
"""

import json
from collections.abc import Callable, Mapping
from typing import Final

from prfaas import names
from prfaas.api import PrefillPool
from prfaas.engines import ADMIN_PORT
from prfaas.wire.routes import EngineName
from prfaas_operator.plan.pool_status import PoolObject, role_of
from prfaas_operator.render import vllm
from prfaas_operator.render.certificates import TLS_DIR_ARGS
from prfaas_operator.render.common import EGRESS_FILE, TMP_PATH, words
from prfaas_operator.render.launch import Start, StartTerms, cache_events, event_ports, json_values, parallel_flags

UCX_TCP: Final = vllm.UCX_TCP
_MOONCAKE_TCP: Final = {"MC_FORCE_TCP": "1", "MOONCAKE_PROTOCOL": "tcp"}
_ENGINE_CONFIG: Final = "PRFAAS_ENGINE_CONFIG"
_ENGINE_CONFIG_PATH: Final = f"{TMP_PATH}/prfaas-engine.yaml"


def start(pool: PoolObject, terms: StartTerms) -> Start:
    """Return how an instance of a pool starts."""
    return STARTS[pool.spec.engine.record.name](pool, terms)


def asks_for_rdma(pool: PoolObject) -> bool:
    transfer = pool.spec.engine.transfer
    return transfer is not None and transfer.protocol == "Rdma"


def _prfaas(pool: PoolObject, terms: StartTerms) -> Start:
    """Return how an instance of our worker starts, which emulates one if its arguments say so."""
    spec = pool.spec
    flags = {
        "--model-source": spec.model.source,
        "--model-name": spec.model.name,
        "--host": "$(POD_IP)",
        "--api-port": str(names.WORKER_API_PORT),
        "--data-port": str(names.WORKER_DATA_PORT),
        "--admin-port": str(names.WORKER_ADMIN_PORT),
        "--instance": "$(POD_NAME)",
        "--cluster": spec.cluster_name or names.HUB,
        "--pool": pool.metadata.name,
        "--role": role_of(pool),
        "--drain-seconds": str(spec.drain_seconds),
    }
    if isinstance(pool, PrefillPool):
        flags["--egress-file"] = EGRESS_FILE
    # Not "api", which is scraped: this port has the same figures as that of probes and metrics.
    ports = {"http": names.WORKER_API_PORT, "data": names.WORKER_DATA_PORT, ADMIN_PORT: names.WORKER_ADMIN_PORT}
    arguments = [*words(flags), *spec.engine.args]
    return Start(
        ["prfaas-worker"], arguments, {}, ports, health_path="", tls_args=TLS_DIR_ARGS, image=terms.worker_image
    )


def _sglang(pool: PoolObject, _: StartTerms) -> Start:
    spec = pool.spec
    flags = {
        "--model-path": spec.model.source,
        "--served-model-name": spec.model.name,
        "--host": "$(POD_IP)",
        "--port": str(names.WORKER_API_PORT),
        "--disaggregation-mode": role_of(pool),
        "--disaggregation-bootstrap-port": str(names.BOOTSTRAP_PORT),
        "--kv-events-config": json.dumps(cache_events(pool)),
        **parallel_flags(pool),
    }
    return Start(
        ["python3", "-m", "sglang.launch_server"],
        [*words(flags), "--disaggregation-enable-kv-checksum", "--enable-metrics", *spec.engine.args],
        {} if asks_for_rdma(pool) else {**_MOONCAKE_TCP, **UCX_TCP},
        {**event_ports(pool), "bootstrap": names.BOOTSTRAP_PORT},
    )


def _tensorrt_llm(pool: PoolObject, _: StartTerms) -> Start:
    """Return the start of trtllm-serve, which reads its cache transceiver's settings only from a file."""
    spec, parallelism = pool.spec, pool.spec.parallelism
    extra = spec.engine.transfer.extra_config if spec.engine.transfer else {}
    config = {
        "cache_transceiver_config": {"backend": "UCX", **json_values(extra)},
        "return_perf_metrics": True,
        "enable_iter_perf_stats": True,
        # A prefill instance hands its cache over after each step.
        **({"disable_overlap_scheduler": True} if role_of(pool) == "prefill" else {}),
    }
    flags = {
        "--host": "$(POD_IP)",
        "--port": str(names.WORKER_API_PORT),
        "--config": _ENGINE_CONFIG_PATH,
        **({"--tp_size": str(parallelism.tensor), "--pp_size": str(parallelism.pipeline)} if parallelism else {}),
    }
    write = f'printf %s "${_ENGINE_CONFIG}" > {_ENGINE_CONFIG_PATH} && exec trtllm-serve "$@"'
    return Start(
        ["/bin/sh", "-c", write, "trtllm-serve"],
        ["serve", spec.model.source, *words(flags), *spec.engine.args],
        {_ENGINE_CONFIG: json.dumps(config), **({} if asks_for_rdma(pool) else UCX_TCP)},
        {"api": names.WORKER_API_PORT},
    )


def _dynamo(pool: PoolObject, _: StartTerms) -> Start:
    """Return the start of a Dynamo frontend, which finds its own workers by the pool's `env` and `args`."""
    flags = {"--http-host": "$(POD_IP)", "--http-port": str(names.WORKER_API_PORT)}
    return Start(
        ["python3", "-m", "dynamo.frontend"],
        [*words(flags), *pool.spec.engine.args],
        {},
        {"api": names.WORKER_API_PORT},
    )


STARTS: Final[Mapping[EngineName, Callable[[PoolObject, StartTerms], Start]]] = {
    "prfaas": _prfaas,
    "emulated": _prfaas,
    "vllm-prfaas": vllm.start_with_ours,
    "vllm-nixl": vllm.start_with_nixl,
    "vllm-mooncake": vllm.start_with_mooncake,
    "sglang": _sglang,
    "tensorrt-llm": _tensorrt_llm,
    "dynamo": _dynamo,
}
"""How an instance starts, by its engine."""
