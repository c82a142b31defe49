"""Proves `prfaas simulate` and `prfaas compare`: figures on stdout, plots on demand, and mistakes in one sentence."""

import json

import pytest
import yaml
from typer.testing import CliRunner

from prfaas.cli.main import app
from prfaas.errors import ConfigError
from prfaas.simulate.scenario import POLICIES

from .test_main import ROOT

TRACE = "\n".join(
    json.dumps({"timestamp": at * 3000, "input_length": 2000, "output_length": 20, "hash_ids": [0, at, at, at]})
    for at in range(40)
)


@pytest.fixture
def file(tmp_path):
    document = yaml.safe_load((ROOT / "examples" / "simulate.yaml").read_text())
    document["simulation"]["requests"] = 60
    path = tmp_path / "small.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


def run(*arguments: object):
    return CliRunner().invoke(app, [str(one) for one in arguments], catch_exceptions=True)


def test_a_run_prints_its_figures_and_the_same_ones_again(file):
    first, second = (run("simulate", "-f", file, "--policy", "static", "-o", "json").stdout for _ in range(2))
    figures = json.loads(first)
    assert (figures["policy"], figures["completed"], figures["requests"]) == ("static", 60, 60)
    assert first == second


def test_a_comparison_has_a_column_a_policy_and_no_nan(file):
    shown = run("compare", "-f", file).stdout
    assert all(name in shown for name in (*POLICIES, "TTFT p90"))
    assert "nan" not in shown.lower()
    figures = json.loads(run("compare", "-f", file, "-o", "json").stdout)
    assert {name: one["completed"] for name, one in figures["policies"].items()} == dict.fromkeys(POLICIES, 60)


def test_a_trace_is_served_at_its_own_rate_or_another(file, tmp_path):
    trace = tmp_path / "trace.jsonl"
    trace.write_text(TRACE)
    own = json.loads(run("simulate", "-f", file, "--trace", trace, "-o", "json").stdout)
    other = json.loads(run("simulate", "-f", file, "--trace", trace, "--rate", 4, "-o", "json").stdout)
    assert (own["requests"], own["arrivals_per_second"]) == (40, pytest.approx(1 / 3))
    assert (other["completed"], other["arrivals_per_second"]) == (40, 4)
    assert own["hit_rate"] > 0


@pytest.mark.system  # matplotlib asks `fc-list` for fonts, once a machine
@pytest.mark.parametrize(("command", "name"), [("simulate", "a.png"), ("compare", "a.html")])
def test_a_plot_is_a_picture_or_a_page_that_needs_nothing_else(file, tmp_path, command, name):
    pytest.importorskip("matplotlib")
    path = tmp_path / name
    assert run(command, "-f", file, "--plot", path).exit_code == 0
    if name.endswith(".png"):
        assert path.read_bytes().startswith(b"\x89PNG")
        return
    written = path.read_text(encoding="utf-8")
    assert "<svg" in written
    assert not {"<script", "<img", "<link"} & set(written.split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--plot", "here.gif"], "its name must end in .png or .html"),
        (["--trace", "nowhere.jsonl"], "nowhere.jsonl cannot be read"),
        (["--rate", "0"], "--rate is 0 requests a second"),
    ],
)
def test_a_mistake_is_one_sentence(file, arguments, message):
    ended = run("simulate", "-f", file, *arguments)
    assert isinstance(ended.exception, ConfigError)
    assert message in str(ended.exception)


def test_a_rate_within_an_slo_needs_an_slo(file):
    document = yaml.safe_load(file.read_text())
    del document["slo"]
    file.write_text(yaml.safe_dump(document))
    ended = run("compare", "-f", file, "--within-slo")
    assert isinstance(ended.exception, ConfigError)
    assert "slo.ttftMillis" in str(ended.exception)
