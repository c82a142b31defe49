"""Secrets with certificates, cert-manager's Certificates, and a pod's fields to use them.

No manifest names a Secret's type, which cannot change: Secrets that people restored or made keep theirs.
"""

import base64
from collections.abc import Mapping, Sequence
from copy import deepcopy
from datetime import datetime, timedelta
from typing import Any, Final

from prfaas import identity, names
from prfaas.conditions import rfc3339
from prfaas.engines import ADMIN_PORT
from prfaas.identity import KeyPair
from prfaas.rights import Identity
from prfaas_operator.clusters import kinds
from prfaas_operator.clusters.kinds import Object
from prfaas_operator.plan.certificates import GATEWAYS, Issuer, holder_name
from prfaas_operator.plan.certificates_read import WRITTEN_AT, Store
from prfaas_operator.render.common import LABEL_CLUSTER_UID, PART_OF

SECRET: Final = names.TLS_SECRET
GATEWAY_SECRET: Final = names.GATEWAY_TLS_SECRET
AUTHORITY_SECRET: Final = names.AUTHORITY_SECRET
VOLUME: Final = "prfaas-tls"
PATH: Final = "/etc/prfaas/tls"
MODE: Final = 0o440  # the pods' group only: the container is not root
TLS_DIR_ARGS: Final = ("--tls-dir", PATH)
PURPOSES: Final = ("client auth", "server auth", "digital signature")


def worker_in_tls(deployment: Object, args: Sequence[str]) -> Object:
    """Return a worker's Deployment with the certificate mounted, HTTPS probes at its API and the engine's flags for
    TLS."""
    changed = _with_certificate(deployment, SECRET, args)
    container = changed["spec"]["template"]["spec"]["containers"][0]
    for probe in container.keys() & {"startupProbe", "readinessProbe", "livenessProbe"}:
        if container[probe]["httpGet"]["port"] != ADMIN_PORT:  # which is plain, as a gateway's
            container[probe]["httpGet"]["scheme"] = "HTTPS"
    return changed


def gateway_in_tls(deployment: Object) -> Object:
    """Return a gateway's Deployment whose gateway container reaches workers over TLS, with gateways' certificate."""
    return _with_certificate(deployment, GATEWAY_SECRET, TLS_DIR_ARGS)


def _with_certificate(deployment: Object, secret: str, args: Sequence[str]) -> Object:
    """Return a Deployment whose first container mounts the certificate and has these flags."""
    changed = deepcopy(deployment)
    template = changed["spec"]["template"]
    template["metadata"].setdefault("annotations", {})[names.ANNOTATION_SCHEME] = "https"
    template["spec"]["volumes"].append({"name": VOLUME, "secret": {"secretName": secret, "defaultMode": MODE}})
    container = template["spec"]["containers"][0]
    container["args"] += args
    # The whole folder: the kubelet never updates a file that is mounted by itself.
    container["volumeMounts"].append({"name": VOLUME, "mountPath": PATH, "readOnly": True})
    return changed


def is_in_tls(deployment: Object) -> bool:
    """Return true if the pods of a live Deployment have the certificate."""
    annotations = deployment["spec"]["template"]["metadata"].get("annotations") or {}
    return annotations.get(names.ANNOTATION_SCHEME) == "https"


def secret_of(holder: str) -> str:
    """Return the name of a holder's Secret, in its own cluster."""
    return GATEWAY_SECRET if holder == GATEWAYS else SECRET


def labels(cluster: str, member_uid: str = "") -> dict[str, str]:
    """Return the labels of a cluster's Secrets; `member_uid` is the uid of its MemberCluster, none for the hub."""
    mine = {**PART_OF, names.LABEL_CLUSTER: cluster}
    return mine | ({LABEL_CLUSTER_UID: member_uid} if member_uid else {})


def held_secret(
    name: str, wanted_labels: Mapping[str, str], pair: KeyPair, store: Store, now: datetime, settling: timedelta
) -> Object:
    """Return the Secret that holds a holder's certificate and key, the trusted authorities, who is revoked, and within
    what time all pods have read it."""
    metadata = {"name": name, "labels": dict(wanted_labels), "annotations": {WRITTEN_AT: rfc3339(now)}}
    data = {names.TLS_CERT: pair.certificate, names.TLS_KEY: pair.key, names.TLS_TRUSTED: store.bundle}
    data[names.TLS_SETTLE] = f"{settling.total_seconds():g}".encode()
    if store.revoked:
        data[names.TLS_REVOKED] = identity.write_revoked(store.revoked)
    return _secret(metadata, data)


def authority_secret(data: Mapping[str, bytes], live: Mapping[str, Any] | None) -> Object:
    """Return the hub's Secret of authorities, which replaces only the version that was read."""
    version = {key: live["metadata"][key] for key in ("uid", "resourceVersion")} if live is not None else {}
    return _secret({"name": AUTHORITY_SECRET, "labels": dict(PART_OF), **version}, data)


def _secret(metadata: Object, data: Mapping[str, bytes]) -> Object:
    encoded = {entry: base64.b64encode(content).decode() for entry, content in data.items()}
    return kinds.manifest(kinds.SECRET, metadata, data=encoded)


def certificate_name(holder: str) -> str:
    """Return the name of a holder's cert-manager Certificate: with the dot, it is no cluster's."""
    return f"prfaas-{holder.replace('/', '.')}"


def issued_secret(holder: str) -> str:
    """Return the name of the hub's Secret with an issuer's certificate for a holder."""
    return f"{certificate_name(holder)}-issued"


def certificate(who: Identity, domain: str, issuer: Issuer, life: timedelta) -> Object:
    """Return the cert-manager Certificate of a holder in a trust domain."""
    name = holder_name(who)
    spec = {
        "secretName": issued_secret(name),
        "uris": [identity.uri_of(who, domain)],
        "usages": list(PURPOSES),
        "duration": _duration(life),
        # At two thirds of its life, as the operator renews its own.
        "renewBefore": _duration(life / 3),
        # A new key with each certificate; cert-manager's default was to keep the old one.
        "privateKey": {"algorithm": "ECDSA", "size": 256, "rotationPolicy": "Always"},
        "issuerRef": issuer._asdict(),
    }
    metadata = {"name": certificate_name(name), "labels": labels(who.cluster)}
    return kinds.manifest(kinds.CERTIFICATE, metadata, spec=spec)


def _duration(length: timedelta) -> str:
    """Return a duration in Go's form; any other form would always differ from the API server's copy."""
    minutes, seconds = divmod(int(length.total_seconds()), 60)
    return f"{minutes // 60}h{minutes % 60}m{seconds}s"
