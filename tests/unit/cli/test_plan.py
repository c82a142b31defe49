"""Proves that `prfaas plan` finds the published plan within the promised margins, and says what it cannot read."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer
import yaml
from tests.unit.capacity.systems import PAPER_FILE, paper_document
from typer.testing import CliRunner

from prfaas.capacity import planfile
from prfaas.cli.plan import load, plan
from prfaas.errors import ConfigError

KEYS = [
    "threshold_tokens", "n_prfaas", "n_p", "n_d", "theta_prfaas", "theta_pd_p", "theta_pd_d", "lambda_max",
    "offloaded_fraction", "egress_gbps", "ttft_mean_seconds", "ttft_p90_seconds",
]  # fmt: skip
FEW_LENGTHS = {"histogram": {"edgesTokens": [0, 1_000, 20_000, 100_000], "counts": [5, 3, 2]}, "outputTokens": 100}
app = typer.Typer()
app.command()(plan)


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments))
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture(scope="module")
def paper() -> dict[str, Any]:
    return json.loads(run("-f", str(PAPER_FILE), "-o", "json"))


def write(folder: Path, **fields: object) -> str:
    path = folder / "plan.yaml"
    path.write_text(yaml.safe_dump({**paper_document(), "workload": FEW_LENGTHS, **fields}))
    return str(path)


def test_every_system_has_the_promised_keys(paper):
    for system in ("hub_alone", "prfaas_pd", "homogeneous", "naive_heterogeneous"):
        assert list(paper[system]) == KEYS


def test_table_6_is_reproduced_within_the_promised_margins(paper):
    margins = {"threshold_tokens": 0.10, "egress_gbps": 0.10, "ttft_mean_seconds": 0.05, "ttft_p90_seconds": 0.05}
    for system, figures in paper_document()["published"].items():
        for key, published in figures.items():
            margin = 0 if key.startswith("n_") else margins.get(key, 0.02)
            assert paper[system][key] == pytest.approx(published, rel=margin), (system, key)


def test_the_table_shows_ours_and_the_published_figures_and_no_nan(tmp_path):
    shown = run("-f", write(tmp_path, slo={"ttftMillis": 60_000}))
    assert "Lambda_max, 1/s" in shown
    assert "3.24" in shown
    assert "keeps slo.ttftMillis at P90 at up to" in shown
    assert "nan" not in shown.lower().replace("n_", "")


def test_names_are_printed_as_they_are_written(tmp_path):
    links = [{"name": "[/link] :smile:", "capacityMbps": 100_000}]
    (pool,) = paper_document()["offloadPools"]
    changed = {**pool, "name": "[/pool]", "link": "[/link] :smile:"}
    text = write(tmp_path, links=links, offloadPools=[changed], published={})
    assert "[/pool]" in " ".join(run("-f", text).split())


def test_the_verdict_comes_first_and_the_hub_alone_is_the_first_column(paper):
    first, *rest = run("-f", str(PAPER_FILE)).splitlines()
    assert first.startswith("PrfaaS-PD serves 135% more than the hub alone")
    assert next(iter(paper)) == "verdict"
    assert " ".join(paper["verdict"]["sentence"].split()).startswith(first.strip())
    alone, offloading = (paper[name]["lambda_max"] for name in ("hub_alone", "prfaas_pd"))
    assert paper["verdict"]["gain"] == pytest.approx(offloading / alone - 1)
    heads = next(line.split() for line in rest if "homogeneous" in line)
    assert heads[:2] == ["alone", "homogeneous"]
    assert "PrfaaS-PD" in heads[heads.index("naive") :]
    rows = {name: next(line for line in rest if line.startswith(f" {name}")) for name in ("over hub alone", "over hom")}
    assert "2.35" in rows["over hub alone"]
    assert "1.57" in rows["over hom"]


def test_times_are_shown_by_class_of_length(tmp_path):
    assert "Mean time to the first token by length" in run("-f", write(tmp_path))
    assert "by length" not in run("-f", write(tmp_path, offloadPools=[], links=[])), "there is nothing to compare"


def test_a_hub_without_members_is_one_system_without_thresholds(tmp_path):
    found = json.loads(run("-f", write(tmp_path, offloadPools=[], links=[]), "-o", "json"))
    assert "prfaas_pd" not in found
    assert found["homogeneous"]["threshold_tokens"] is None


def test_a_trace_is_found_beside_the_file(tmp_path):
    lines = [{"timestamp": i, "input_length": 600 * (1 + i % 3), "output_length": 5, "hash_ids": []} for i in range(30)]
    for line in lines:
        line["hash_ids"] = list(range(-(-line["input_length"] // 512)))
    (tmp_path / "trace.jsonl").write_text("\n".join(map(json.dumps, lines)))
    found = json.loads(run("-f", write(tmp_path, workload={"trace": "trace.jsonl"}), "-o", "json"))
    assert found["prfaas_pd"]["lambda_max"] > 0


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "cannot be read"),
        ("a: [", "is not YAML"),
        ("", "the file is empty; it must describe a system"),
        ("a: 1\n---\nb: 2\n", "holds 2 YAML documents; give a file with one system"),
        ("hub: []\nprofiles: {}\nworkload: {trace: none.csv}", "none.csv cannot be read"),
        ("hub: []\nprofiles: {}\nworkload: {trace: torn.csv}", "torn.csv, line 1: this is no trace"),
        ("hub: []\nprofiles: {}\nworkload: {trace: empty.csv}", "empty.csv is empty"),
    ],
)
def test_a_file_that_says_nothing_is_named(tmp_path, text, says):
    (tmp_path / "torn.csv").write_text("TIMESTAMP,Context")
    (tmp_path / "empty.csv").write_text("")
    path = tmp_path / "plan.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=says):
        run("-f", str(path))


def test_a_system_comes_from_a_file_or_from_a_cluster_and_not_from_both():
    for arguments in ((), ("-f", str(PAPER_FILE), "--from-cluster")):
        with pytest.raises(ConfigError, match="either --file with a system, or --from-cluster"):
            run(*arguments)


def test_a_running_installation_is_planned_like_a_file(monkeypatch, paper):
    places: list[tuple[object, ...]] = []

    def source(*place: object) -> planfile.PlanFile:
        places.append(place)
        return load(PAPER_FILE)

    point = SimpleNamespace(load=lambda: source)
    monkeypatch.setattr(
        "prfaas.cli.plan.entry_points", lambda group, name: {("prfaas.plan_sources", "cluster"): [point]}[group, name]
    )
    assert json.loads(run("--from-cluster", "-n", "there", "--policy", "kimi", "-o", "json")) == paper
    assert places == [(None, None, "there", "kimi")]


def test_without_the_operators_part_no_cluster_is_planned(monkeypatch):
    monkeypatch.setattr("prfaas.cli.plan.entry_points", lambda **_: [])
    with pytest.raises(ConfigError, match=r"pip install '\.\[operator\]'"):
        run("--from-cluster")
