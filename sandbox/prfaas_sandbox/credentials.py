"""Certificates, keys and kubeconfigs of one sandbox cluster, whose CA lives as long as the cluster does.

Private keys in the state folder are readable only for their owner. Kubeconfigs hold everything inline.
"""

import base64
import datetime
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from prfaas.errors import ConfigError
from prfaas.identity import KeyPair, issue_client, issue_server, make_authority, valid_for
from prfaas.util import replace_file

VALID_DAYS = 30


class ClusterAuthority:
    """The certificate authority of one cluster, in memory."""

    def __init__(self, name: str):
        self._validity = valid_for(datetime.datetime.now(datetime.UTC), VALID_DAYS)
        self._pair = make_authority(name, self._validity)
        self.certificate = self._pair.certificate

    def client(self, user: str, *groups: str) -> KeyPair:
        return issue_client(self._pair, user, groups, self._validity)

    def server(self, name: str, hosts: Sequence[str]) -> KeyPair:
        """Return a certificate for DNS names and IP addresses; it is also a client certificate, as etcd needs."""
        return issue_server(self._pair, name, hosts, self._validity)


def write_pair(pair: KeyPair, folder: Path, name: str) -> tuple[Path, Path]:
    """Write NAME.crt and NAME.key (mode 0600) and return the two paths."""
    certificate, key = folder / f"{name}.crt", folder / f"{name}.key"
    certificate.write_bytes(pair.certificate)
    replace_file(key, pair.key, 0o600)
    return certificate, key


def service_account_key() -> tuple[bytes, bytes]:
    key = ec.generate_private_key(ec.SECP256R1())
    pem, plain = serialization.Encoding.PEM, serialization.NoEncryption()
    private = key.private_bytes(pem, serialization.PrivateFormat.TraditionalOpenSSL, plain)
    return private, key.public_key().public_bytes(pem, serialization.PublicFormat.SubjectPublicKeyInfo)


@dataclass(frozen=True)
class Kubeconfig:
    """One cluster, one user, one context. `name` is the cluster's, the context's and the user's prefix."""

    name: str
    server: str
    authority: bytes
    user: KeyPair

    def render(self) -> str:
        user = f"{self.name}-user"
        cluster = {"server": self.server, "certificate-authority-data": _encode(self.authority)}
        credentials = {
            "client-certificate-data": _encode(self.user.certificate),
            "client-key-data": _encode(self.user.key),
        }
        document = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": self.name, "cluster": cluster}],
            "users": [{"name": user, "user": credentials}],
            "contexts": [{"name": self.name, "context": {"cluster": self.name, "user": user}}],
            "current-context": self.name,
        }
        return json.dumps(document, indent=2) + "\n"

    def write(self, path: Path) -> Path:
        replace_file(path, self.render().encode(), 0o600)
        return path


def read_kubeconfig(path: Path) -> Kubeconfig:
    """Read a file of `Kubeconfig.write`; raise ConfigError for another kind of kubeconfig."""
    try:
        document: Any = yaml.safe_load(path.read_text())
        cluster, user = document["clusters"][0], document["users"][0]["user"]
        pair = KeyPair(_decode(user["client-certificate-data"]), _decode(user["client-key-data"]))
        authority = _decode(cluster["cluster"]["certificate-authority-data"])
        return Kubeconfig(cluster["name"], cluster["cluster"]["server"], authority, pair)
    except (OSError, yaml.YAMLError, LookupError, TypeError, ValueError) as error:
        raise ConfigError(f"{path} is not a kubeconfig of the sandbox: {error}") from error


def _encode(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _decode(text: str) -> bytes:
    return base64.b64decode(text, validate=True)
