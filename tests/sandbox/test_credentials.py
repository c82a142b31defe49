"""Servers are trusted under their names, kubeconfigs hold everything inline, and private keys stay private."""

import base64
import ssl

import pytest
import yaml

from prfaas.errors import ConfigError
from prfaas.identity import KeyPair
from prfaas_sandbox.credentials import ClusterAuthority, Kubeconfig, read_kubeconfig, write_pair


def handshake(server: KeyPair, authority: bytes, name: str, folder) -> None:
    """Shake hands in memory; raise SSLError when the client does not trust the server."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*write_pair(server, folder, "server"))
    client_context = ssl.create_default_context(cadata=authority.decode())
    client_context.verify_flags |= ssl.VERIFY_X509_STRICT
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = client_context.wrap_bio(to_client, to_server, server_hostname=name)
    peer = context.wrap_bio(to_server, to_client, server_side=True)
    for end in (client, peer, client):
        try:
            end.do_handshake()
        except ssl.SSLWantReadError:
            continue


def test_a_server_is_trusted_under_its_names_by_those_who_know_its_authority(tmp_path):
    authority = ClusterAuthority("ca")
    server = authority.server("api", ["127.0.0.1", "kubernetes.default"])
    for name in ("127.0.0.1", "kubernetes.default"):
        handshake(server, authority.certificate, name, tmp_path)
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(server, authority.certificate, "10.0.0.1", tmp_path)
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(server, ClusterAuthority("ca").certificate, "127.0.0.1", tmp_path)


def test_a_kubeconfig_is_inline_private_and_read_back_as_it_was(tmp_path):
    authority = ClusterAuthority("ca")
    kubeconfig = Kubeconfig("hub", "https://127.0.0.1:1", authority.certificate, authority.client("admin"))
    path = kubeconfig.write(tmp_path / "kubeconfig")
    assert path.stat().st_mode & 0o777 == 0o600
    assert read_kubeconfig(path) == kubeconfig
    document = yaml.safe_load(path.read_text())
    assert set(document["users"][0]["user"]) == {"client-certificate-data", "client-key-data"}
    encoded = document["clusters"][0]["cluster"]["certificate-authority-data"]
    assert base64.b64decode(encoded) == authority.certificate


@pytest.mark.parametrize("text", ["", "{", "clusters: []", "- 1"])
def test_other_files_are_refused_by_name(tmp_path, text):
    path = tmp_path / "other"
    path.write_text(text)
    with pytest.raises(ConfigError, match="other is not a kubeconfig of the sandbox"):
        read_kubeconfig(path)
