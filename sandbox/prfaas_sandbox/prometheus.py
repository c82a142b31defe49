"""Prometheus in the hub for both clusters; besides the control planes it is the sandbox's only service. Pure."""

import json
from pathlib import Path

from prfaas.kube.session import Object
from prfaas.names import ANNOTATION_SCHEME, HUB, LABEL_CLUSTER, LABEL_POLICY, LABEL_POOL, LABEL_ROLE
from prfaas_sandbox.network import HUB as HUB_NETWORK

PORT = 9090
ADDRESS = HUB_NETWORK.address
SERVICE = "prometheus.monitoring.svc"  # what an installation's own Prometheus is often called, and the example says
INTERNAL_URL = f"http://{SERVICE}:{PORT}"
SCRAPED_PORTS = "api|admin|metrics|link-metrics"
RETENTION = "6h"


def configuration(kubeconfigs: dict[str, Path], scrape_seconds: int = 1) -> str:
    """Return the configuration file's text (JSON, which is YAML); each kubeconfig may list pods of its cluster."""
    interval = f"{scrape_seconds}s"
    jobs = [_job(cluster, kubeconfig) for cluster, kubeconfig in kubeconfigs.items()]
    every = {"scrape_interval": interval, "scrape_timeout": interval}
    return json.dumps({"global": every, "scrape_configs": jobs}, indent=2)


def _job(cluster: str, kubeconfig: Path) -> Object:
    """Return the job that scrapes every named port of prfaas's pods in one cluster."""
    rules = [
        {"source_labels": [_pod_label("app.kubernetes.io/part-of")], "regex": "prfaas", "action": "keep"},
        {"source_labels": ["__meta_kubernetes_pod_container_port_name"], "regex": SCRAPED_PORTS, "action": "keep"},
        {"source_labels": ["__meta_kubernetes_pod_phase"], "regex": "Succeeded|Failed", "action": "drop"},
        {
            "source_labels": [_pod_annotation(ANNOTATION_SCHEME), "__meta_kubernetes_pod_container_port_name"],
            "regex": "https;api",
            "target_label": "__scheme__",
            "replacement": "https",
        },
        {"target_label": "cluster", "replacement": HUB},
        # A pod without the label keeps the hub's name: the hub's own parts are not in any MemberCluster.
        {"source_labels": [_pod_label(LABEL_CLUSTER)], "regex": "(.+)", "target_label": "cluster"},
        *({"source_labels": [source], "target_label": target} for target, source in _TARGET_LABELS.items()),
    ]
    discovery = {"role": "pod", "kubeconfig_file": str(kubeconfig)}
    # A worker's certificate names its cluster, not its address; figures are no secret that another could be told.
    tls = {"insecure_skip_verify": True}
    return {"job_name": cluster, "kubernetes_sd_configs": [discovery], "relabel_configs": rules, "tls_config": tls}


def _pod_label(name: str) -> str:
    return "__meta_kubernetes_pod_label_" + _sanitised(name)


def _pod_annotation(name: str) -> str:
    return "__meta_kubernetes_pod_annotation_" + _sanitised(name)


def _sanitised(name: str) -> str:
    return "".join(letter if letter.isalnum() else "_" for letter in name)


_TARGET_LABELS = {
    "pool": _pod_label(LABEL_POOL),
    "policy": _pod_label(LABEL_POLICY),
    "role": _pod_label(LABEL_ROLE),
    "pod": "__meta_kubernetes_pod_name",
    "namespace": "__meta_kubernetes_namespace",
}


def command(program: Path, config: Path, data: Path) -> list[str | Path]:
    return [
        program,
        f"--config.file={config}",
        f"--storage.tsdb.path={data}",
        f"--storage.tsdb.retention.time={RETENTION}",
        f"--web.listen-address={ADDRESS}:{PORT}",
        "--log.level=warn",
    ]
