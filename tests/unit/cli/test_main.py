"""Proves the `prfaas` command's frame: what is listed, how mistakes end, and what a missing extra says."""

import io
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from importlib.metadata import EntryPoint, version
from pathlib import Path
from typing import NamedTuple

import pytest
from typer.testing import CliRunner

from prfaas.cli import main
from prfaas.console import run_app

ROOT = Path(__file__).resolve().parents[3]


class Ended(NamedTuple):
    returncode: object
    stdout: str
    stderr: str


def prfaas(*arguments: str) -> Ended:
    """Run the command in this process: another process would import all of it anew."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err), pytest.raises(SystemExit) as ended:
        run_app(main.app, "prfaas", arguments)
    return Ended(ended.value.code, out.getvalue(), err.getvalue())


def test_every_installed_part_is_listed():
    listed = prfaas("--help").stdout
    assert {"bench", "certs", "cluster", "crds", "demo", "sandbox", "version"} <= set(listed.split())


@pytest.mark.parametrize(
    "command",
    [["bench"], ["certs", "issue"], ["cluster", "join"], ["crds", "write"], ["demo"], ["explain"], ["sandbox", "up"]],
)
def test_every_command_explains_itself_with_an_example(command):
    explained = prfaas(*command, "--help")
    assert (explained.returncode, "Example: prfaas" in " ".join(explained.stdout.split())) == (0, True)


@pytest.mark.parametrize("arguments", [["--nope"], ["demo", "--nope"], ["nowhere"], ["sandbox", "link", "wide"]])
def test_a_wrong_word_ends_with_2_and_one_explanation(arguments):
    ended = prfaas(*arguments)
    assert (ended.returncode, ended.stderr.count("\n")) == (2, 1)
    assert ended.stderr.startswith("prfaas")
    assert "--help)" in ended.stderr


def test_names_the_right_flag_or_command_for_a_misspelt_one():
    assert "did you mean --link-mbps?" in prfaas("sandbox", "up", "--link-mbsp", "3").stderr
    assert "Did you mean 'simulate'?" in prfaas("simulat").stderr


@pytest.mark.parametrize("command", [["plan"], ["bench"], ["certs", "show", "x"], ["cluster", "list"], ["status"]])
def test_a_wrong_format_is_answered_in_the_same_words_everywhere(command):
    ended = prfaas(*command, "-o", "xml")
    message = "Invalid value for '--output' / '-o': 'xml' is not one of "
    assert (ended.returncode, message in ended.stderr) == (2, True)


@pytest.mark.parametrize("command", ["demo", "status"])
def test_a_command_without_subcommands_offers_none(command):
    assert prfaas(command, "--help").stdout.startswith(f"Usage: prfaas {command} [OPTIONS]\n")


def test_completion_can_be_installed_and_the_version_shown():
    assert "--install-completion" in prfaas("--help").stdout
    assert prfaas("--version").stdout.strip() == version("prfaas")


@pytest.mark.parametrize(
    "command",
    [["status"], ["cluster", "join", "eu", "--context", "eu", "--link-mbps", "9"], ["plan", "--from-cluster"]],
)
def test_without_a_kubeconfig_one_sentence_says_what_to_do(command, monkeypatch, tmp_path):
    monkeypatch.delenv("KUBECONFIG", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    ended = prfaas(*command)
    assert ended.returncode == 1
    assert ended.stderr.splitlines() == [
        "prfaas: there is no kubeconfig at ~/.kube/config; set KUBECONFIG to yours, or give its flag (see --help)"
    ]


def test_a_folder_of_the_demo_that_cannot_be_made_is_one_sentence():
    ended = prfaas("demo", "--state", "/proc/x")
    assert (ended.returncode, ended.stderr.count("\n")) == (1, 1)
    assert "--state /proc/x cannot be made" in ended.stderr


def test_benchmarks_are_listed_and_an_unknown_one_names_them(monkeypatch, tmp_path):
    names = prfaas("bench").stdout.split()
    assert {"gateway", "scheduler", "worker", "worker_memory"} <= set(names)
    assert "report" not in names
    unknown = prfaas("bench", "nothing")
    assert (unknown.returncode, ", ".join(names) in unknown.stderr) == (1, True)
    monkeypatch.chdir(tmp_path)
    outside = prfaas("bench")
    assert (outside.returncode, "run from a checkout" in outside.stderr) == (1, True)


@pytest.mark.system
def test_a_call_imports_only_the_subcommand_that_it_names():
    """The others cost a second of imports, which each call in a shell loop would pay."""
    code = "import sys; from prfaas.cli import main; sys.argv[1:] = ['crds', '--help']; main.main()"
    show = (
        "import atexit, sys\n"
        "atexit.register(lambda: print(*sorted(one for one in sys.modules if one.startswith('prfaas.cli.'))))\n"
    )
    ended = subprocess.run([sys.executable, "-c", show + code], capture_output=True, text=True, timeout=60, check=True)
    assert ended.stdout.splitlines()[-1] == "prfaas.cli.crds prfaas.cli.main"


@pytest.mark.system
def test_further_arguments_reach_the_benchmark():
    command = [sys.executable, "-m", "prfaas.cli.main", "bench", "worker", "--nope", "somewhere"]
    refused = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=180, check=False)
    assert (refused.returncode, "No such option: --nope" in refused.stderr) == (2, True)


def test_a_part_whose_extra_is_missing_says_how_to_install_it(monkeypatch):
    point = EntryPoint(name="fleet", value="prfaas_operator.no_such_module:app", group=main.ENTRY_POINT_GROUP)
    monkeypatch.setattr(main, "entry_points", lambda **_: [point])
    ended = CliRunner().invoke(main.app, ["fleet", "join", "--help"])
    assert ended.exit_code == 2
    assert "pip install '.[operator]'" in ended.output


@pytest.mark.parametrize("command", ["demo", "kind", "sandbox"])
def test_a_command_of_the_sandbox_without_the_sandbox_says_in_one_sentence_where_it_is(monkeypatch, command):
    monkeypatch.setattr(main, "entry_points", lambda **_: [])
    ended = CliRunner().invoke(main.app, [command, "--keep"])
    assert ended.exit_code == 2
    assert ended.output.startswith(f"prfaas {command}: not installed: clone the repository and run `make ")
    assert ended.output.count("\n") == 1
