"""Certificates, keys and kubeconfigs of one sandbox cluster, whose CA lives as long as the cluster does.

Elliptic curve keys, because a control plane needs eight of them before it can start. Private keys are written for the
owner only, into the state folder. Kubeconfigs hold everything inline: no path, no command, nothing that only this
machine could read.
"""

import base64
import datetime
import ipaddress
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from prfaas.errors import ConfigError

VALID_FOR = datetime.timedelta(days=30)
CLOCK_SKEW = datetime.timedelta(minutes=5)


@dataclass(frozen=True)
class KeyPair:
    """A certificate and its private key, both PEM."""

    certificate: bytes
    key: bytes

    def write(self, folder: Path, name: str) -> tuple[Path, Path]:
        """Write NAME.crt and NAME.key (mode 0600) and return the two paths."""
        certificate, key = folder / f"{name}.crt", folder / f"{name}.key"
        certificate.write_bytes(self.certificate)
        write_private(key, self.key)
        return certificate, key


def write_private(path: Path, content: bytes) -> None:
    """Write a file that only its owner can read, from its first byte on."""
    path.unlink(missing_ok=True)
    path.touch(mode=0o600)
    path.write_bytes(content)


def private_key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    """Return an unencrypted PEM of the key."""
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.TraditionalOpenSSL, serialization.NoEncryption()
    )


class Authority:
    """A certificate authority in memory.

    Args:
        name: common name of the CA.

    """

    def __init__(self, name: str):
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        builder = self._builder(self._name, self._key.public_key())
        usage = x509.KeyUsage(
            digital_signature=True,
            key_cert_sign=True,
            crl_sign=True,
            content_commitment=False,
            key_encipherment=False,
            data_encipherment=False,
            key_agreement=False,
            encipher_only=False,
            decipher_only=False,
        )
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        self._certificate = builder.add_extension(usage, critical=True).sign(self._key, hashes.SHA256())

    @property
    def certificate(self) -> bytes:
        """The CA's own certificate, PEM."""
        return self._certificate.public_bytes(serialization.Encoding.PEM)

    def client(self, user: str, *groups: str) -> KeyPair:
        """Return a client certificate that Kubernetes reads as `user` in `groups`."""
        subject = [x509.NameAttribute(NameOID.ORGANIZATION_NAME, group) for group in groups]
        name = x509.Name([*subject, x509.NameAttribute(NameOID.COMMON_NAME, user)])
        return self._issue(name, [ExtendedKeyUsageOID.CLIENT_AUTH], ())

    def server(self, name: str, hosts: Sequence[str]) -> KeyPair:
        """Return a certificate for DNS names and IP addresses `hosts`; it may also act as a client, as etcd's does."""
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        return self._issue(subject, [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH], hosts)

    def _issue(self, subject: x509.Name, usages: list[x509.ObjectIdentifier], hosts: Sequence[str]) -> KeyPair:
        key = ec.generate_private_key(ec.SECP256R1())
        builder = self._builder(subject, key.public_key())
        builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        builder = builder.add_extension(x509.ExtendedKeyUsage(usages), critical=False)
        if hosts:
            names = x509.SubjectAlternativeName([_general_name(host) for host in hosts])
            builder = builder.add_extension(names, critical=False)
        certificate = builder.sign(self._key, hashes.SHA256())
        return KeyPair(certificate.public_bytes(serialization.Encoding.PEM), private_key_pem(key))

    def _builder(self, subject: x509.Name, key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - CLOCK_SKEW)
            .not_valid_after(now + VALID_FOR)
            # Python's ssl is strict about the identifiers from 3.13 on.
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False)
        )


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def service_account_key() -> tuple[bytes, bytes]:
    """Return (private, public) PEM of the key that signs service account tokens."""
    key = ec.generate_private_key(ec.SECP256R1())
    public = key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    return private_key_pem(key), public


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
