"""The credentials of a member cluster: validates a kubeconfig, and reads the expiry of the token in it.

A kubeconfig is a program: `exec` and `auth-provider` run commands, path fields read files, `proxy-url` and
`insecure-skip-tls-verify` expose the token to others. A person who may create a Secret in the hub must not run any of
that inside the operator. So `parse_kubeconfig` is an allow-list. It refuses every field that is not known to be
harmless, also in entries that the current context does not use.

The payload of a ServiceAccount's JWT names its account and its expiry. The operator uses them for its own credential
only, and never as a proof. Lifetimes come from the token instead of the request, because an API server may grant less.
"""

import base64
import binascii
import json
import re
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit

import yaml

from prfaas_operator.errors import KubeconfigRefusedError

CLUSTER_FIELDS: Final = frozenset(
    {"server", "certificate-authority-data", "tls-server-name", "disable-compression", "extensions"}
)
USER_FIELDS: Final = frozenset({"token", "client-certificate-data", "client-key-data", "extensions"})
WHY: Final = {
    "exec": "it would run a command inside the operator",
    "auth-provider": "it would run a plugin inside the operator",
    "certificate-authority": "it would read a file of the operator; inline it as certificate-authority-data",
    "client-certificate": "it would read a file of the operator; inline it as client-certificate-data",
    "client-key": "it would read a file of the operator; inline it as client-key-data",
    "tokenFile": "it would read a file of the operator; inline the token",
    "proxy-url": "it would send the credentials through a proxy",
    "insecure-skip-tls-verify": "it would send the credentials to a server whose certificate was not checked",
    "username": "passwords are not accepted; use a token",
    "password": "passwords are not accepted; use a token",
}
ADVICE: Final = "`prfaas cluster join` makes an accepted one"
MAX_BYTES: Final = 256 * 1024
TOKEN: Final = re.compile(r"[\x21-\x7e]+")


class Access(NamedTuple):
    """Access to one API server: https address, CA bundle, and either a token or a client certificate with key."""

    server: str
    ca_pem: str
    tls_server_name: str = ""
    token: str = ""
    client_certificate_pem: str = ""
    client_key_pem: str = ""

    def __repr__(self) -> str:
        """Show the address only: the rest is secret or long."""
        return f"Access(server={self.server!r})"


def parse_kubeconfig(document: bytes) -> Access:
    """Read a kubeconfig.

    Raises KubeconfigRefusedError: it is no kubeconfig, or holds a refused field; the message names the field.
    """
    if len(document) > MAX_BYTES:
        raise _refuse(f"is larger than {MAX_BYTES} bytes")
    try:
        config = yaml.safe_load(document)
    except (yaml.YAMLError, UnicodeDecodeError, ValueError, RecursionError) as error:
        raise _refuse("is not YAML") from error
    if not isinstance(config, Mapping):
        raise _refuse("is not a mapping with clusters, users and contexts")
    clusters = _entries(config, "clusters", "cluster", CLUSTER_FIELDS)
    users = _entries(config, "users", "user", USER_FIELDS)
    contexts = _entries(config, "contexts", "context", None)
    context = _chosen(contexts, config.get("current-context"), "current-context")
    cluster = _chosen(clusters, context.get("cluster"), "the current context's cluster")
    user = _chosen(users, context.get("user"), "the current context's user")
    return Access(
        server=_server(cluster),
        ca_pem=_pem(cluster, "certificate-authority-data"),
        tls_server_name=_text(cluster, "tls-server-name"),
        **_credential(user),
    )


def with_token(document: bytes, token: str) -> bytes:
    """Return a kubeconfig with another token that `parse_kubeconfig` accepts, as JSON, which is YAML."""
    config = yaml.safe_load(document)
    context = next(entry["context"] for entry in config["contexts"] if entry["name"] == config["current-context"])
    user = next(entry["user"] for entry in config["users"] if entry["name"] == context["user"])
    user["token"] = token
    return json.dumps(config, indent=1).encode()


def _refuse(what: str) -> KubeconfigRefusedError:
    return KubeconfigRefusedError(f"kubeconfig {what}; {ADVICE}")


def _entries(
    config: Mapping[str, Any], plural: str, field: str, allowed: frozenset[str] | None
) -> dict[str, Mapping[str, Any]]:
    entries = config.get(plural)
    if not isinstance(entries, list) or not entries:
        raise _refuse(f"has no list of {plural}")
    found: dict[str, Mapping[str, Any]] = {}
    for entry in entries:
        body = entry.get(field) if isinstance(entry, Mapping) else None
        if not isinstance(body, Mapping) or not isinstance(entry.get("name"), str):
            raise _refuse(f"has an entry of {plural} without name or {field}")
        for key in sorted(map(str, body.keys() - allowed)) if allowed is not None else ():
            reason = WHY.get(key, "it is not known to be harmless")
            raise _refuse(f"{plural} entry {entry['name']!r}: {key} is refused, because {reason}")
        found[entry["name"]] = body
    return found


def _chosen(entries: dict[str, Mapping[str, Any]], name: Any, what: str) -> Mapping[str, Any]:
    if not isinstance(name, str) or name not in entries:
        raise _refuse(f"{what} {name!r} names none of its entries ({', '.join(sorted(entries))})")
    return entries[name]


def _text(body: Mapping[str, Any], field: str) -> str:
    value = body.get(field, "")
    if not isinstance(value, str):
        raise _refuse(f"{field} must be text")
    return value


def _server(cluster: Mapping[str, Any]) -> str:
    server = _text(cluster, "server")
    try:
        # Reading `port` raises ValueError for what is no port.
        parts = urlsplit(server)
        usable = parts.scheme == "https" and bool(parts.hostname) and parts.username is None and parts.port != 0
    except ValueError:
        usable = False
    if not usable:
        raise _refuse(f"server {server!r} must be an https:// address")
    return server.rstrip("/")


def _pem(body: Mapping[str, Any], field: str) -> str:
    try:
        pem = base64.b64decode(_text(body, field), validate=True).decode("ascii")
    except (binascii.Error, ValueError) as error:
        raise _refuse(f"{field} is not base64 of PEM text") from error
    if "-----BEGIN " not in pem:
        raise _refuse(f"{field} is missing or holds no PEM block")
    return pem


def _credential(user: Mapping[str, Any]) -> dict[str, str]:
    token, has_certificate = _text(user, "token"), "client-certificate-data" in user or "client-key-data" in user
    if bool(token) == has_certificate:
        raise _refuse("needs exactly one credential: a token, or client-certificate-data with client-key-data")
    if has_certificate:
        return {
            "client_certificate_pem": _pem(user, "client-certificate-data"),
            "client_key_pem": _pem(user, "client-key-data"),
        }
    if not TOKEN.fullmatch(token):
        raise _refuse("token holds blanks or characters that no token has")
    return {"token": token}


DEFAULT_TOKEN_DAYS: Final = 30
"""Renewed at half its life, a token survives an outage of half that: two weeks."""
SECONDS_PER_DAY: Final = 86_400
SUBJECT: Final = "system:serviceaccount:"
PARTS_OF_A_JWT: Final = 3


class TokenFacts(NamedTuple):
    """The fields of a ServiceAccount's token."""

    namespace: str
    account: str
    issued_at: datetime
    expires_at: datetime

    @property
    def lifetime(self) -> timedelta:
        return self.expires_at - self.issued_at


def read_token(token: str) -> TokenFacts | None:
    """Return a token's fields; None for a token without an expiry, or one that is not a ServiceAccount's."""
    payload = _payload(token)
    subject = str(payload.get("sub", ""))
    namespace, _, account = subject.removeprefix(SUBJECT).partition(":")
    issued, expires = payload.get("iat"), payload.get("exp")
    if not subject.startswith(SUBJECT) or not isinstance(issued, int) or not isinstance(expires, int):
        return None
    try:
        return TokenFacts(namespace, account, datetime.fromtimestamp(issued, UTC), datetime.fromtimestamp(expires, UTC))
    except (ValueError, OverflowError, OSError):
        return None


def _payload(token: str) -> dict[str, Any]:
    parts = token.split(".")
    if len(parts) != PARTS_OF_A_JWT:
        return {}
    try:
        # A JWT has its padding cut off (RFC 7515, section 2).
        payload = json.loads(base64.urlsafe_b64decode(parts[1] + "=" * (-len(parts[1]) % 4)))
    except (binascii.Error, ValueError, RecursionError):
        return {}
    return payload if isinstance(payload, dict) else {}


def is_renewal_due(facts: TokenFacts, now: datetime) -> bool:
    """Return true if half of a token's life is over."""
    return now >= facts.issued_at + facts.lifetime / 2


def has_expired(facts: TokenFacts | None, now: datetime) -> bool:
    """Tell whether a token is known to have expired."""
    return facts is not None and now >= facts.expires_at
