"""Kubeconfigs hold everything inline, and private keys stay private."""

import base64

import pytest
import yaml

from prfaas.errors import ConfigError
from prfaas_sandbox.credentials import ClusterAuthority, Kubeconfig, read_kubeconfig


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
