"""Proves that a person's kubeconfig is read as kubectl reads it: contexts, files beside it, several files, plugins."""

import base64
import json
import ssl
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import yaml

from prfaas import identity
from prfaas.errors import ConfigError
from prfaas.kube import kubeconfig

pytestmark = pytest.mark.system

NOW = identity.valid_for(datetime.now(UTC), 1)
AUTHORITY = identity.make_authority("a", NOW)


def write(path: Path, user: dict[str, Any], cluster: dict[str, Any] | None = None, name: str = "c") -> Path:
    inline = {"certificate-authority-data": base64.b64encode(AUTHORITY.certificate).decode()}
    document = {
        "clusters": [{"name": name, "cluster": {"server": f"https://{name}:6443", **(cluster or inline)}}],
        "users": [{"name": name, "user": user}],
        "contexts": [{"name": name, "context": {"cluster": name, "user": name}}],
        "current-context": name,
    }
    path.write_text(yaml.safe_dump(document))
    return path


def authorization(path: Path | None, context: str | None = None) -> str:
    found = kubeconfig.load(path, context).authorization
    return found() if found else ""


@pytest.mark.parametrize(
    ("user", "header"),
    [
        ({"token": "t"}, "Bearer t"),
        ({"tokenFile": "token"}, "Bearer from-file"),
        ({"username": "u", "password": "p"}, "Basic dTpw"),
        ({}, ""),
    ],
)
def test_credentials_of_every_form(tmp_path, user, header):
    (tmp_path / "token").write_text("from-file\n")
    assert authorization(write(tmp_path / "config", user)) == header


def test_files_lie_beside_the_kubeconfig_that_names_them(tmp_path):
    (tmp_path / "ca.crt").write_bytes(AUTHORITY.certificate)
    (tmp_path / "tls.crt").write_bytes(AUTHORITY.certificate)
    (tmp_path / "tls.key").write_bytes(AUTHORITY.key)
    user = {"client-certificate": "tls.crt", "client-key": "tls.key"}
    found = kubeconfig.load(write(tmp_path / "config", user, {"certificate-authority": "ca.crt"}), None)
    assert (found.configuration.host, found.configuration.ca_cert_data) == (
        "https://c:6443",
        AUTHORITY.certificate.decode(),
    )
    assert len(found._rest.ssl_context.get_ca_certs()) == 1


def test_several_files_are_merged_and_the_first_one_says_which_context(tmp_path, monkeypatch):
    paths = [write(tmp_path / name, {"token": name}, name=name) for name in ("one", "two")]
    monkeypatch.setenv("KUBECONFIG", ":".join(map(str, paths)))
    assert authorization(None) == "Bearer one"
    assert authorization(None, "two") == "Bearer two"


@pytest.mark.parametrize(
    "text", ['token: SECRET-OF-MINE: "x', "token: SECRET-OF-MINE\n\t- x", "token: [SECRET-OF-MINE"]
)
def test_a_damaged_file_is_named_with_the_line_and_not_repeated(tmp_path, text):
    path = tmp_path / "config"
    path.write_text(f"users:\n- name: u\n  user:\n    {text}\n")
    with pytest.raises(ConfigError, match=r"config: .*line [456]") as refusal:
        kubeconfig.load(path, None)
    assert "SECRET" not in str(refusal.value)


def test_a_missing_user_is_an_error_and_no_call_goes_out_without_a_name(tmp_path):
    path = write(tmp_path / "config", {"token": "t"})
    path.write_text(path.read_text().replace("user: c", "user: nobody"))
    with pytest.raises(ConfigError, match="nobody"):
        kubeconfig.load(path, None)


def test_a_kubeconfig_may_switch_checking_off(tmp_path):
    found = kubeconfig.load(write(tmp_path / "config", {"token": "t"}, {"insecure-skip-tls-verify": True}), None)
    assert found._rest.ssl_context.verify_mode == ssl.CERT_NONE


PLUGIN = """
import json, os, sys
info = json.loads(os.environ["KUBERNETES_EXEC_INFO"])
count = os.path.getsize(sys.argv[1]) if os.path.exists(sys.argv[1]) else 0
open(sys.argv[1], "a").write("x")
status = {"token": f"{os.environ['WHO']}-{count}", "expirationTimestamp": sys.argv[2]}
print(json.dumps({"apiVersion": info["apiVersion"], "kind": "ExecCredential", "status": status}))
"""


def plugin(tmp_path: Path, ends: str) -> dict[str, Any]:
    (tmp_path / "plugin.py").write_text(PLUGIN)
    return {
        "exec": {
            "apiVersion": "client.authentication.k8s.io/v1",
            "command": sys.executable,
            "args": [str(tmp_path / "plugin.py"), str(tmp_path / "runs"), ends],
            "env": [{"name": "WHO", "value": "me"}],
        }
    }


@pytest.mark.parametrize(("ends", "later"), [("2999-01-01T00:00:00Z", "me-0"), ("2001-01-01T00:00:00Z", "me-1")])
def test_a_plugin_is_run_again_once_its_token_has_ended(tmp_path, ends, later):
    assert authorization(write(tmp_path / "config", plugin(tmp_path, ends))) == f"Bearer {later}"


@pytest.mark.parametrize(
    ("user", "words"),
    [
        ({"exec": {"apiVersion": "v1", "command": "/nowhere/plugin"}}, "exec plugin /nowhere/plugin"),
        ({"exec": {"apiVersion": "v1", "command": "true"}}, "exec plugin true"),
        ({"auth-provider": {"name": "gcp"}}, "auth-provider is not supported"),
        ({"client-certificate-data": "%"}, "client-certificate-data is not base64"),
        ({"client-certificate": "missing"}, "missing"),
    ],
)
def test_reports_what_it_cannot_use_in_a_sentence(tmp_path, user, words):
    with pytest.raises(ConfigError, match=words):
        kubeconfig.load(write(tmp_path / "config", user), None)


@pytest.mark.parametrize("document", ["", "7", "[]", json.dumps({"current-context": "x", "contexts": [{}]}), "a: ["])
def test_no_kubeconfig_is_no_traceback(tmp_path, document):
    path = tmp_path / "config"
    path.write_text(document)
    with pytest.raises(ConfigError, match="kubeconfig"):
        kubeconfig.load(path, None)


@pytest.mark.parametrize(
    ("server", "cluster", "no_proxy", "proxy"),
    [
        ("https://api.example:6443", {}, "", "http://proxy.example:3128"),
        ("https://api.example:6443", {"proxy-url": "http://own:1"}, "", "http://own:1"),
        ("https://api.example:6443", {}, ".example", None),
        ("https://10.1.2.3:6443", {}, "", "http://proxy.example:3128"),
        ("https://10.1.2.3:6443", {}, "localhost, 10.0.0.0/8", None),
        ("https://127.0.0.1:6443", {}, "", None),
        ("https://[::1]:6443", {}, "", None),
        ("https://localhost:6443", {}, "", None),
    ],
)
def test_a_proxy_of_the_environment_is_used_as_kubectl_uses_it(tmp_path, monkeypatch, server, cluster, no_proxy, proxy):
    for name in ("https_proxy", "no_proxy", "NO_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HTTPS_PROXY", "proxy.example:3128")
    if no_proxy:
        monkeypatch.setenv("NO_PROXY", no_proxy)
    inline = {"certificate-authority-data": base64.b64encode(AUTHORITY.certificate).decode()}
    path = write(tmp_path / "config", {}, {**inline, "server": server, **cluster})
    assert kubeconfig.load(path, None).configuration.proxy == proxy


def test_a_file_that_is_no_kubeconfig_is_named(tmp_path):
    path = tmp_path / "passwd"
    path.write_text("root:x:0:0")
    with pytest.raises(ConfigError, match=r"passwd is no kubeconfig: it holds no clusters, users and contexts"):
        kubeconfig.load(path, None)
