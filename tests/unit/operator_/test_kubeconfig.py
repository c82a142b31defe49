"""Proves that a kubeconfig is reduced to address, CA and one credential, and refused for anything else in it."""

import base64
import copy
from typing import Any

import pytest
import yaml

from prfaas_operator.errors import KubeconfigRefusedError
from prfaas_operator.plan.credentials import MAX_BYTES, parse_kubeconfig

PEM = "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"
PEM_64 = base64.b64encode(PEM.encode()).decode()
GOOD = {
    "apiVersion": "v1",
    "kind": "Config",
    "clusters": [{"name": "c", "cluster": {"server": "https://10.0.0.1:6443/", "certificate-authority-data": PEM_64}}],
    "users": [{"name": "u", "user": {"token": "abc.def"}}],
    "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u", "namespace": "ignored"}}],
    "current-context": "x",
}


def with_cluster(**fields: Any) -> dict[str, Any]:
    config = copy.deepcopy(GOOD)
    config["clusters"][0]["cluster"] |= {name.replace("_", "-"): value for name, value in fields.items()}
    return config


def with_user(**fields: Any) -> dict[str, Any]:
    config = copy.deepcopy(GOOD)
    config["users"][0]["user"] = {name.replace("_", "-"): value for name, value in fields.items()}
    return config


def with_top(**fields: Any) -> dict[str, Any]:
    return {**copy.deepcopy(GOOD), **{name.replace("_", "-"): value for name, value in fields.items()}}


def read(config: Any):
    return parse_kubeconfig(yaml.safe_dump(config).encode())


def test_a_token_with_an_inline_ca_is_accepted():
    access = read(GOOD)
    assert (access.server, access.ca_pem, access.token) == ("https://10.0.0.1:6443", PEM, "abc.def")


def test_an_inline_client_certificate_is_accepted():
    access = read(with_user(client_certificate_data=PEM_64, client_key_data=PEM_64))
    assert (access.token, access.client_certificate_pem, access.client_key_pem) == ("", PEM, PEM)


def test_the_server_name_for_tls_is_kept():
    assert read(with_cluster(tls_server_name="kubernetes")).tls_server_name == "kubernetes"


def test_printing_an_access_shows_no_secret():
    assert repr(read(GOOD)) == "Access(server='https://10.0.0.1:6443')"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (with_user(exec={"command": "touch"}), "exec is refused, because it would run a command"),
        (with_user(auth_provider={"name": "gcp"}), "auth-provider is refused"),
        (with_user(tokenFile="/var/run/token"), "tokenFile is refused, because it would read a file"),
        (with_user(token="t", client_certificate="/a.crt"), "client-certificate is refused"),
        (with_user(token="t", client_key="/a.key"), "client-key is refused"),
        (with_user(username="admin", password="x"), "password is refused"),
        (with_user(token="t", impersonate="root"), "impersonate is refused, because it is not known to be harmless"),
        (with_cluster(certificate_authority="/ca.crt"), "certificate-authority is refused"),
        (with_cluster(proxy_url="http://proxy"), "proxy-url is refused"),
        (with_cluster(insecure_skip_tls_verify=True), "insecure-skip-tls-verify is refused"),
        (with_cluster(insecure_skip_tls_verify=False), "insecure-skip-tls-verify is refused"),
        (with_cluster(server="http://10.0.0.1"), "must be an https:// address"),
        (with_cluster(server="https://user@10.0.0.1"), "must be an https:// address"),
        (with_cluster(server="https://10.0.0.1:99999"), "must be an https:// address"),
        (with_cluster(server=7), "server must be text"),
        (with_cluster(certificate_authority_data="!"), "certificate-authority-data is not base64"),
        (with_cluster(certificate_authority_data=""), "certificate-authority-data is missing"),
        (with_user(), "exactly one credential"),
        (with_user(token="t", client_certificate_data=PEM_64, client_key_data=PEM_64), "exactly one credential"),
        (with_user(client_certificate_data=PEM_64), "client-key-data is missing"),
        (with_user(token="a b"), "token holds blanks"),
        (with_user(token="a\r\nX-Evil: 1"), "token holds blanks"),
        (with_top(current_context="other"), "current-context 'other' names none"),
        (with_top(users=[]), "has no list of users"),
        (with_top(users=[{"name": "u"}]), "without name or user"),
        (with_top(clusters="c"), "has no list of clusters"),
        (["a"], "is not a mapping"),
        ("a: [", "is not a mapping"),
    ],
)
def test_refuses_by_name_what_could_run_read_or_leak(config: Any, message: str):
    with pytest.raises(KubeconfigRefusedError, match="prfaas cluster join") as refused:
        read(config)
    assert message in str(refused.value)


def test_an_entry_that_is_not_used_is_checked_as_well():
    config = copy.deepcopy(GOOD)
    config["users"].append({"name": "spare", "user": {"exec": {"command": "sh"}}})
    with pytest.raises(KubeconfigRefusedError, match="'spare': exec"):
        read(config)


@pytest.mark.parametrize("document", [b"\xff\xfe\x00", b"a: [", b"!!python/object/apply:os.system ['true']", b""])
def test_bytes_that_are_no_kubeconfig_are_refused(document: bytes):
    with pytest.raises(KubeconfigRefusedError):
        parse_kubeconfig(document)


def test_does_not_parse_an_oversized_document():
    with pytest.raises(KubeconfigRefusedError, match="larger than"):
        parse_kubeconfig(b"#" * (MAX_BYTES + 1))


def test_a_refusal_never_repeats_a_credential():
    with pytest.raises(KubeconfigRefusedError) as refused:
        read(with_user(token="very secret"))
    assert "very secret" not in str(refused.value)
