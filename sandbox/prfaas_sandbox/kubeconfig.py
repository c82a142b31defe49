"""Kubeconfigs with everything inline: no path, no command, nothing that only this machine could read."""

import base64
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from prfaas.errors import ConfigError
from prfaas_sandbox.pki import KeyPair, write_private


@dataclass(frozen=True)
class Kubeconfig:
    """One cluster, one user, one context.

    Args:
        name: name of the cluster, the context and the user's prefix.
        server: URL of the API server.
        authority: the cluster's CA, PEM.
        user: client certificate and key.

    """

    name: str
    server: str
    authority: bytes
    user: KeyPair

    def render(self) -> str:
        """Return the file's text (JSON, which is YAML)."""
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
        """Write the file for its owner alone and return its path."""
        write_private(path, self.render().encode())
        return path


def read_kubeconfig(path: Path) -> Kubeconfig:
    """Read back a file that `Kubeconfig.write` wrote; raise ConfigError when it is another kind of kubeconfig."""
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
