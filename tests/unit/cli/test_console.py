"""The four deployables speak alike: flags, help, version, log lines, and what they say where an extra is missing."""

import importlib
import io
import json
import os
import re
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from importlib.metadata import version

import pytest

pytestmark = pytest.mark.system

NEEDED = {
    "gateway": ["--routes-file", "/absent/routes.json"],
    "operator": [
        *("--namespace", "prfaas", "--gateway-image", "gateway", "--worker-image", "worker", "--connector-image", "c")
    ],
    "scheduler": [
        *("--control-socket", "x", "--policy", "p", "--namespace", "n", "--identity", "i", "--host", "192.0.2.1")
    ],
    "worker": ["--model-source", "/absent/model", "--model-name", "m", "--tls-dir", "/absent/tls"],
}
"""What each requires, with a mistake that ends it after its log has begun."""
HIDE = """
import runpy, sys

class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in HIDDEN:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

HIDDEN = set(sys.argv[1].split(","))
sys.meta_path.insert(0, Hidden())
sys.argv = sys.argv[2:]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""
LACKING = {
    "gateway": "uvloop,numpy",
    "operator": "kopf,aiohttp",
    "scheduler": "aiohttp",
    "worker": "uvloop,torch,jinja2,numpy,transformers,tokenizers",
}
DEPLOYABLES = sorted(NEEDED)


def environment(**more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PRFAAS_", "KUBE"))}
    return kept | more


def run(*command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, *command]
    return subprocess.run(words, env=environment(**variables), capture_output=True, text=True, timeout=120, check=False)


def flags(name: str, *arguments: str) -> tuple[object, str, str]:
    """Return the exit code of a command line that ends before anything is served, and both outputs."""
    out, err = io.StringIO(), io.StringIO()
    main = importlib.import_module(f"prfaas_{name}.__main__").main
    with redirect_stdout(out), redirect_stderr(err), pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [name, *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
    return ended.value.code, out.getvalue(), err.getvalue()


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch) -> None:
    monkeypatch.delenv("PRFAAS_LOG_FORMAT", raising=False)
    monkeypatch.delenv("PRFAAS_LOG_LEVEL", raising=False)


@pytest.mark.parametrize("name", DEPLOYABLES)
def test_help_has_an_example_and_the_version_is_that_of_the_distribution(name):
    code, shown, _ = flags(name, "--help")
    assert code == 0
    assert re.search(rf"Examples?:\s+prfaas-{name} --", shown)
    assert flags(name, "--version") == (0, f"{version('prfaas')}\n", "")


@pytest.mark.parametrize("name", DEPLOYABLES)
def test_an_unknown_flag_is_one_line_with_the_right_one_and_exit_code_2(name):
    message = f"prfaas-{name}: No such option: --log-fromat; did you mean --log-format? (see prfaas-{name} --help)\n"
    assert flags(name, *NEEDED[name], "--log-fromat", "json") == (2, "", message)


@pytest.mark.parametrize("name", DEPLOYABLES)
def test_refuses_an_invalid_level_in_the_same_words(name, monkeypatch):
    monkeypatch.setenv("PRFAAS_LOG_LEVEL", "loud")
    message = f"prfaas-{name}: PRFAAS_LOG_LEVEL is 'LOUD': set it to DEBUG, INFO, WARNING, or not at all\n"
    assert flags(name, *NEEDED[name]) == (2, "", message)


@pytest.mark.parametrize("name", DEPLOYABLES)
def test_refuses_an_invalid_form_also_from_the_environment(name, monkeypatch):
    monkeypatch.setenv("PRFAAS_LOG_FORMAT", "xml")
    code, _, message = flags(name, *NEEDED[name])
    assert code == 2
    assert "'--log-format'" in message
    assert "'xml' is not one of 'text', 'json'" in message


@pytest.mark.parametrize("name", DEPLOYABLES)
def test_without_its_extra_it_says_in_one_line_what_to_install_and_still_shows_help(name):
    ended = run("-c", HIDE, LACKING[name], f"prfaas_{name}", *NEEDED[name])
    assert ended.returncode == 2
    assert re.fullmatch(
        rf"prfaas-{name}: \w+ is missing; run in a checkout of prfaas: pip install '\.\[{name}\]'\n", ended.stderr
    ), ended.stderr
    if name == "worker":
        assert run("-c", HIDE, LACKING[name], f"prfaas_{name}", "--help").returncode == 0


def test_a_command_whose_extra_is_missing_is_one_line_too():
    ended = run("-c", HIDE, LACKING["operator"], "prfaas.cli.main", "status")
    assert (ended.returncode, ended.stderr.count("\n")) == (2, 1), ended.stderr
    assert " is missing; run in a checkout of prfaas: pip install '.[operator]'" in ended.stderr


def lines_of(name: str) -> list[str]:
    """Return what a process logs as text, then the same as JSON."""
    code = f"""
import logging
from prfaas.telemetry.logs import configure_logs as configure
if {name!r} == "operator":
    from prfaas_operator.logs import configure, about
    about(kind="DecodePool", name="d")
log = logging.getLogger("prfaas_{name}.x")
for log_format in ("text", "json"):
    logging.getLogger().handlers.clear()
    configure("place of {name}", log_format)
    log.debug("hidden")
    log.warning("it %s", "broke")
    try:
        raise ValueError("why")
    except ValueError:
        log.exception("two")
"""
    return run("-c", code).stderr.splitlines()


@pytest.mark.parametrize("name", DEPLOYABLES)
def test_a_line_has_time_level_place_and_words_as_text_and_as_json(name):
    keys = " kind=DecodePool name=d" if name == "operator" else ""
    first, second, *trace, third, fourth = lines_of(name)
    moment = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}"
    assert re.fullmatch(rf"{moment} WARNING place of {name}: it broke{keys}", first)
    assert second.endswith(f"ERROR place of {name}: two{keys}")
    assert trace[-1] == "ValueError: why"
    broke, two = json.loads(third), json.loads(fourth)
    assert (broke["level"], broke["place"], broke["message"]) == ("warning", f"place of {name}", "it broke")
    assert broke["logger"] == f"prfaas_{name}.x"
    assert "ValueError: why" in two["exception"]
    assert (broke.get("kind"), broke.get("name")) == (("DecodePool", "d") if name == "operator" else (None, None))
