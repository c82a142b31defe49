"""Containers of our own worker."""

from prfaas import names
from prfaas.api import PrefillPool
from prfaas_operator.plan.pool_status import PoolObject, role_of
from prfaas_operator.render import common
from prfaas_operator.render.certificates import TLS_DIR_ARGS
from prfaas_operator.render.launch import Start, StartTerms


def start(pool: PoolObject, _: StartTerms) -> Start:
    """Return how an instance of our worker starts."""
    spec = pool.spec
    flags = {
        "--model-source": spec.model.source,
        "--model-name": spec.model.name,
        "--host": "$(POD_IP)",
        "--api-port": str(names.WORKER_API_PORT),
        "--data-port": str(names.WORKER_DATA_PORT),
        "--instance": "$(POD_NAME)",
        "--cluster": spec.cluster_name or names.HUB,
        "--pool": pool.metadata.name,
        "--role": role_of(pool),
        "--drain-seconds": str(spec.drain_seconds),
    }
    if isinstance(pool, PrefillPool):
        flags["--egress-file"] = common.EGRESS_FILE
    ports = {"api": names.WORKER_API_PORT, "data": names.WORKER_DATA_PORT}
    arguments = [*common.words(flags), *spec.engine.args]
    return Start(["prfaas-worker"], arguments, {}, ports, health_path="", tls_args=TLS_DIR_ARGS)
