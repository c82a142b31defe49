"""Reads the user's kubeconfig as kubectl does: merged files, contexts, file references, exec plugins, and proxies.

Use it only for the kubeconfig of the process's own user: a kubeconfig may run commands and read files. The operator
checks other kubeconfigs against an allow-list. Decision 017 says why the package's own reader is not used.
"""

import base64
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit
from urllib.request import getproxies_environment

import yaml

from prfaas.errors import ConfigError
from prfaas.kube.package import needs_no_proxy
from prfaas.kube.session import Authorization, KubeSession, bearer, token_of_file

EXEC_SECONDS: Final = 120.0
"""An exec plugin may open a browser and wait for a person."""
RENEW_BEFORE: Final = timedelta(seconds=30)
NEVER: Final = datetime.max.replace(tzinfo=UTC)
BASE: Final = "prfaas.io/folder"
"""Key under which an entry remembers the folder of its file: relative paths start there."""
THIS_MACHINE: Final = "localhost,127.0.0.0/8,::1"

Entry = Mapping[str, Any]


def load(path: Path | None, context: str | None) -> KubeSession:
    """Return a session by a kubeconfig's context, by default the usual file's current one; raises ConfigError."""
    try:
        cluster, user = _chosen(path, context)
        server = str(cluster["server"])
        authorization, certificate, key = _credentials(user)
        return KubeSession(
            server,
            authorization=authorization,
            certificate=certificate,
            key=key,
            ca_cert_data=_content(cluster, "certificate-authority"),
            verify_ssl=not cluster.get("insecure-skip-tls-verify"),
            tls_server_name=cluster.get("tls-server-name"),
            proxy=cluster.get("proxy-url") or _proxy_of_environment(server),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        named = path or "of $KUBECONFIG or ~/.kube/config"
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        raise ConfigError(f"kubeconfig {named}: {kind}{error}") from error


def _proxy_of_environment(server: str) -> str | None:
    """Return the proxy that $HTTPS_PROXY or $HTTP_PROXY names for a server; NO_PROXY and this machine need none."""
    proxies = getproxies_environment()
    proxy = proxies.get(urlsplit(server).scheme)
    if not proxy:
        return None
    if needs_no_proxy(server, f"{THIS_MACHINE},{proxies.get('no', '')}"):
        return None
    return proxy if "://" in proxy else f"http://{proxy}"


def _chosen(path: Path | None, context: str | None) -> tuple[Entry, Entry]:
    """Return the cluster and the user of a context. In several files the first entry of a name counts."""
    named = os.environ.get("KUBECONFIG", "").split(os.pathsep)
    paths = [path] if path else [Path(one) for one in named if one] or [Path.home() / ".kube" / "config"]
    files = [one for one in paths if one.exists()]
    if not files:
        where = ", ".join(map(str, paths)).replace(str(Path.home()), "~")
        raise ConfigError(f"there is no kubeconfig at {where}; set KUBECONFIG to yours, or give its flag (see --help)")
    found: dict[str, dict[str, Entry]] = {"contexts": {}, "clusters": {}, "users": {}}
    for each in files:
        document = _parsed(each)
        context = context or document.get("current-context")
        for plural, entries in found.items():
            listed: list[dict[str, Any]] = document.get(plural) or []
            for entry in listed:
                body: dict[str, Any] = {**(entry.get(plural.removesuffix("s")) or {}), BASE: each.parent}
                entries.setdefault(entry["name"], body)
    if not context:
        raise ValueError("it names no current-context")
    if context not in found["contexts"]:
        raise ValueError(f"it has no context {context!r} (it has: {', '.join(found['contexts']) or 'none'})")
    chosen = found["contexts"][context]
    user = chosen.get("user") or ""
    if user and user not in found["users"]:
        raise ValueError(f"its context {context!r} names the user {user!r}, which it does not have")
    return found["clusters"][chosen["cluster"]], found["users"].get(user, {})


def _parsed(path: Path) -> Entry:
    """Read a file. An error names the line and does not repeat it: it may hold a token or a key."""
    try:
        document: dict[str, Any] = yaml.safe_load(path.read_text()) or {}
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else "?"
        raise ValueError(f"it is no YAML in line {line}: {error.problem or error.context}") from None
    except yaml.YAMLError as error:
        raise ValueError(f"it is no YAML: {type(error).__name__}") from None
    if type(document) is not dict:
        raise ConfigError(f"{path} is no kubeconfig: it holds no clusters, users and contexts")
    return document


def _content(entry: Entry, field: str) -> str:
    """Return the inline FIELD-data, else the content of the file FIELD, else nothing."""
    if inline := entry.get(f"{field}-data"):
        try:
            return base64.b64decode(inline, validate=True).decode("ascii")
        except ValueError as error:
            raise ValueError(f"{field}-data is not base64 of PEM text") from error
    return (entry[BASE] / entry[field]).read_text() if entry.get(field) else ""


def _credentials(user: Entry) -> tuple[Authorization | None, str, str]:
    """Return the authorization, and the client's certificate and key."""
    certificate, key = _content(user, "client-certificate"), _content(user, "client-key")
    if "auth-provider" in user:
        raise ValueError("auth-provider is not supported: use an exec plugin, as kubectl advises")
    if user.get("exec"):
        plugin = _ExecPlugin(user["exec"], user[BASE])
        certificate = plugin.status.get("clientCertificateData") or certificate
        return plugin.authorization, certificate, plugin.status.get("clientKeyData") or key
    if user.get("token"):
        return bearer(user["token"]), certificate, key
    if user.get("tokenFile"):
        return token_of_file(user[BASE] / user["tokenFile"]), certificate, key
    if user.get("username") and user.get("password"):
        basic = base64.b64encode(f"{user['username']}:{user['password']}".encode()).decode()
        return (lambda: f"Basic {basic}"), certificate, key
    return None, certificate, key


_FAILURES: Final = (
    *(OSError, subprocess.SubprocessError),
    *(ValueError, RecursionError, KeyError, TypeError, AttributeError),
)
"""Of a command, and of what it prints."""


class _ExecPlugin:
    """Runs a command that prints an ExecCredential, and runs it again when the credential expires."""

    def __init__(self, config: Entry, folder: Path):
        command = str(config["command"])
        # As kubectl: a bare name is looked up in $PATH, a path begins at the kubeconfig's folder.
        self._command = [str(folder / command) if "/" in command else command, *(config.get("args") or ())]
        credential = {
            "apiVersion": config["apiVersion"],
            "kind": "ExecCredential",
            "spec": {"interactive": sys.stdin.isatty()},
        }
        variables = {each["name"]: each["value"] for each in config.get("env") or ()}
        self._environment = {**os.environ, **variables, "KUBERNETES_EXEC_INFO": json.dumps(credential)}
        self._run()

    def authorization(self) -> str:
        if datetime.now(UTC) > self._ends - RENEW_BEFORE:
            self._run()
        token = self.status.get("token")
        return f"Bearer {token}" if token else ""

    def _run(self) -> None:
        """Keep the status in the ExecCredential that the command prints. Its stderr is the person's, for prompts."""
        try:
            ended = subprocess.run(
                self._command, env=self._environment, stdout=subprocess.PIPE, timeout=EXEC_SECONDS, check=True
            )
            self.status: Entry = json.loads(ended.stdout)["status"]
            ends = self.status.get("expirationTimestamp")
            self._ends = datetime.fromisoformat(ends) if ends else NEVER
        except _FAILURES as error:
            raise ConfigError(f"exec plugin {self._command[0]} of the kubeconfig failed: {error}") from error
