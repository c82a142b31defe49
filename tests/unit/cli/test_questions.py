"""The planner refuses a file that cannot be meant as it stands, and marks figures that mean nothing."""

import json
from typing import Any

import pytest
import yaml

from .test_main import ROOT, Ended, prfaas


@pytest.fixture
def answer(tmp_path):
    def ask(command: str, *arguments: str, **changes: Any) -> Ended:
        document = yaml.safe_load((ROOT / "examples" / "simulate.yaml").read_text())
        document["simulation"] |= {"requests": 40}
        for path, value in changes.items():
            *parents, last = path.split("__")
            inner = document
            for part in parents:
                inner = inner.setdefault(part, {})
            inner[last] = value
        file = tmp_path / "system.yaml"
        file.write_text(yaml.safe_dump(document))
        return prfaas(command, "-f", str(file), *arguments)

    return ask


def test_lengths_far_beyond_what_was_measured_are_refused_and_those_of_a_trace_are_noted(answer, tmp_path):
    longer = {"workload__lognormal": {"mu": 9.9, "sigma": 1.0, "minTokens": 128, "maxTokens": 1 << 20}}
    for command in ("plan", "simulate", "compare"):
        ended = answer(command, **longer)
        assert (ended.returncode, ended.stdout, ended.stderr.count("\n")) == (1, "", 1)
        assert "was measured up to 131,072 tokens and prompts reach 1,047,422" in ended.stderr
    lines = [
        {
            "timestamp": 10_000 * i,
            "input_length": tokens,
            "output_length": 5,
            "hash_ids": list(range(-(-tokens // 512))),
        }
        for i, tokens in enumerate((2_000, 300_000))
    ]
    (tmp_path / "trace.jsonl").write_text("\n".join(map(json.dumps, lines)))
    trace, note_text = ("--trace", str(tmp_path / "trace.jsonl")), "measured up to 131072 tokens; prompts reach 300000"
    assert note_text in " ".join(answer("simulate", *trace).stdout.split())
    for command in ("simulate", "compare"):
        assert any(note_text in note for note in json.loads(answer(command, *trace, "-o", "json").stdout)["notes"])


@pytest.mark.parametrize("command", ["plan", "simulate"])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"simulation__load": 75, "simulation__ratePerSecond": None}, "write 0.75 for 75 %"),
        ({"simulation__cacheGib": {"mars": 10}}, "simulation.cacheGib.mars: there are "),
        ({"simulation__reqests": 5}, "did you mean requests?"),
    ],
)
def test_a_mistake_in_the_simulation_is_found_by_the_planner_too(answer, command, changes, message):
    present = {path: value for path, value in changes.items() if value is not None}
    ended = answer(command, **present)
    assert (ended.returncode, ended.stderr.count("\n")) == (1, 1)
    assert message in ended.stderr
    assert "mars" not in message or ended.stderr.rstrip().endswith(", hub")


def test_a_policy_of_a_cluster_is_refused_beside_a_file(answer):
    ended = answer("plan", "--policy", "kimi")
    assert (ended.returncode, "leave --policy out" in ended.stderr) == (1, True)


def test_names_the_right_field_for_one_with_underscores(answer, tmp_path):
    document = yaml.safe_load((ROOT / "examples" / "simulate.yaml").read_text())
    document["workload"]["output_tokens"] = document["workload"].pop("outputTokens")
    file = tmp_path / "x.yaml"
    file.write_text(yaml.safe_dump(document))
    message = "workload.outputTokens is missing; the file has output_tokens: it is outputTokens"
    assert message in prfaas("plan", "-f", str(file)).stderr


def test_policies_that_carry_no_more_than_arrives_are_marked(answer):
    found = json.loads(answer("compare", "--rate", "2.45", "-o", "json").stdout)["policies"]
    assert (found["homogeneous"]["overloaded"], found["static"]["overloaded"]) == (True, False)
    assert "OVERLOADED" in answer("compare", "--rate", "2.45").stdout
    assert "OVERLOADED" not in answer("simulate", "--rate", "1").stdout
