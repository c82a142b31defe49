"""`prfaas profile` lists and shows the built-in profiles, for people, for plans and for programs."""

import msgspec
import pytest
import yaml
from typer.testing import CliRunner

from prfaas.capacity.builtin import Builtin, builtin_names, read_builtin
from prfaas.cli.profile import app
from prfaas.errors import ConfigError

L40S = "qwen3.5-35b-bf16-2xl40s"


def printed(*arguments: str) -> str:
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_the_list_has_a_line_for_each_and_says_what_is_assumed():
    rows = {line.split()[0]: line.split() for line in printed("list").splitlines() if line.split()[:1]}
    assert set(builtin_names()) <= set(rows)
    name, *_, eight, thirty, hundred, cache, basis = rows[L40S]
    assert (name, basis) == (L40S, "estimated")
    assert 0.35 < float(eight) < 0.43
    assert 1.4 < float(thirty) < 1.8
    assert 8 < float(hundred) < 9.5
    assert cache == "0.74"
    assert rows["qwen3.5-397b-fp8-8xh20-141"][-1] == "assumed"


def test_no_line_of_the_list_is_longer_than_a_terminal_of_120_columns():
    assert max(map(len, printed("list").splitlines())) <= 120


def test_json_is_the_profile_itself():
    assert msgspec.json.decode(printed("show", L40S, "-o", "json"), type=Builtin) == read_builtin("name", L40S)
    assert len(msgspec.json.decode(printed("list", "-o", "json"), type=list[Builtin])) == len(builtin_names())


def test_yaml_is_a_section_of_a_plans_file():
    builtin = read_builtin("name", L40S)
    section = yaml.safe_load(printed("show", L40S, "-o", "yaml"))["profiles"][L40S]
    assert [(one["tokens"], one["seconds"]) for one in section["points"]] == [
        (one.tokens, one.seconds) for one in builtin.points
    ]
    assert (section["model"], section["gpu"], section["gpus"]) == ("qwen3.5-35b", "l40s", 2)
    assert section["weightsGb"] == pytest.approx(builtin.weights_bytes / 1e9)


def test_text_names_the_source_and_what_the_curve_was_not_fitted_to():
    text = printed("show", "qwen3.5-397b-fp8-8xb200")
    assert "aiconfigurator-core 0.12.0, kernels of vLLM 0.24.0" in text
    assert "no decode step of batch 1" in text
    assert text.count("not fitted to") == 3


def test_an_unknown_name_is_refused():
    with pytest.raises(ConfigError, match=f"near it are {L40S}"):
        CliRunner().invoke(app, ["show", "qwen3.5-35b-bf16-2xl40"], catch_exceptions=False)
