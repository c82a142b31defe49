"""Proves that `prfaas certs` writes what workers use, keeps keys to their owner and overwrites only with --force."""

import json
import os
import stat
import subprocess
import sys
from datetime import datetime, timedelta
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from prfaas import identity
from prfaas.cli import certs as command
from prfaas.errors import ConfigError
from prfaas_transfer.credentials import PeerCredentials


def certs(*arguments: object) -> Result:
    return CliRunner().invoke(command.app, [str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with an authority in ca/ and credentials of a cluster in eu/."""
    root = tmp_path_factory.mktemp("certs")
    results = [
        certs("init", "--out", root / "ca"),
        certs("issue", "--ca", root / "ca", "--cluster", "eu", "--out", root / "eu"),
    ]
    assert [ended.exit_code for ended in results] == [0, 0], results
    assert not any("PRIVATE" in ended.output for ended in results)
    return root


def test_a_worker_uses_what_was_written(made: Path):
    credentials = PeerCredentials(made / "eu")
    assert credentials.cluster == "eu"
    assert {path.name for path in (made / "eu").iterdir()} == {"tls.crt", "tls.key", "ca.crt"}


def test_a_buyer_has_a_certificate_that_is_of_no_cluster(made: Path, tmp_path: Path):
    assert certs("buyer", "--ca", made / "ca", "--name", "acme", "--out", tmp_path / "acme").exit_code == 0
    assert PeerCredentials(tmp_path / "acme").cluster == "buyer/acme"
    refused = certs("issue", "--ca", made / "ca", "--cluster", "buyer/acme", "--out", tmp_path / "x")
    assert "`prfaas certs buyer`" in str(refused.exception)


def test_each_authority_has_a_trust_domain_of_its_own_and_a_successor_the_one_that_it_is_given(
    made: Path, tmp_path: Path
):
    ours = identity.domain_of((made / "ca" / "ca.crt").read_bytes())
    for name, flags, is_ours in (("new", ("--domain", ours), True), ("other", (), False)):
        assert certs("init", "--out", tmp_path / name, *flags).exit_code == 0
        assert (identity.domain_of((tmp_path / name / "ca.crt").read_bytes()) == ours) is is_ours
    assert "can be no trust domain" in str(certs("init", "--out", tmp_path / "x", "--domain", "A/b").exception)


def test_only_their_owner_may_read_keys(made: Path):
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in made.rglob("*.*")}
    assert {mode for path, mode in modes.items() if path.suffix == ".key"} == {0o600}
    assert all("PRIVATE" in path.read_text() for path in modes if path.suffix == ".key")


def test_show_tells_whose_it_is_until_when_and_that_the_chain_is_good(made: Path):
    shown = certs("show", made / "eu", "-o", "json")
    document = json.loads(shown.stdout)
    assert (shown.exit_code, document["cluster"], document["chain_ok"], document["problem"]) == (0, "eu", True, "")
    begin, end = (datetime.fromisoformat(document[name]) for name in ("not_before", "not_after"))
    assert end - begin - identity.CLOCK_SKEW == timedelta(hours=24), "by default"
    assert document["not_before"] < document["renew_after"] < document["not_after"]
    assert "PRIVATE" not in shown.stdout
    assert document["domain"] == identity.domain_of((made / "ca" / "ca.crt").read_bytes())
    assert "cluster    eu" in certs("show", made / "eu").stdout


def test_show_tells_what_peers_would_refuse(made: Path, tmp_path: Path):
    assert certs("init", "--out", tmp_path / "ca").exit_code == 0
    for name in ("tls.crt", "tls.key"):
        (tmp_path / name).write_bytes((made / "eu" / name).read_bytes())
    (tmp_path / "ca.crt").write_bytes((tmp_path / "ca" / "ca.crt").read_bytes())
    shown = certs("show", tmp_path, "-o", "json")
    document = json.loads(shown.stdout)
    assert (shown.exit_code, document["chain_ok"]) == (1, False)
    assert "not trusted" in document["problem"]


def test_overwrites_nothing_without_force_and_all_with_it(made: Path, tmp_path: Path):
    again = ("issue", "--ca", made / "ca", "--cluster", "eu", "--out", tmp_path / "eu")
    assert certs(*again).exit_code == 0
    before = (tmp_path / "eu" / "tls.key").read_bytes()
    refused = certs(*again)
    assert "has ca.crt, tls.key, tls.crt already; give --force" in str(refused.exception)
    assert (tmp_path / "eu" / "tls.key").read_bytes() == before
    assert certs(*again, "--force").exit_code == 0
    assert (tmp_path / "eu" / "tls.key").read_bytes() != before
    assert {path.name for path in (tmp_path / "eu").iterdir()} == {"tls.crt", "tls.key", "ca.crt"}, "no leftovers"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["issue", "--ca", "nowhere", "--cluster", "eu", "--out", "x"], "nowhere/ca.crt cannot be read"),
        (["show", "nowhere"], "nowhere/tls.crt cannot be read"),
    ],
)
def test_reports_mistakes_in_one_sentence(arguments: list[str], message: str):
    error = certs(*arguments).exception
    assert isinstance(error, ConfigError)
    assert message in str(error)


@pytest.mark.system
def test_the_commands_of_the_tls_page_run_one_after_the_other(tmp_path):
    page = (Path(__file__).parents[3] / "docs/operate/tls.md").read_text()
    lines = [
        line.strip()
        for line in page.splitlines()
        if line.startswith(("    prfaas certs", "    domain=", "    cp ", "    cat "))
    ]
    script = "set -e\n" + "\n".join(lines)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    ended = subprocess.run(
        ["bash", "-c", script],
        cwd=tmp_path,
        env=os.environ | {"PATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert len(lines) > 5
    assert ended.returncode == 0, ended.stderr
    assert (tmp_path / "both.crt").read_text().count("BEGIN CERTIFICATE") == 2
    old, new = (identity.domain_of((tmp_path / name / "ca.crt").read_bytes()) for name in ("ca", "new"))
    assert old == new
