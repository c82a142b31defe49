"""Proves what each part of the evaluation serves, how long it takes, and that a headline without runs is a miss."""

from random import Random

import msgspec
import pytest
from benchmarks.evaluation import __main__ as command
from benchmarks.evaluation import disturbed
from benchmarks.evaluation.__main__ import LongPartName, PartName, part_of
from benchmarks.evaluation.compared import ComparedName, figures_of
from benchmarks.evaluation.part import EvaluationPart, simulator_of
from benchmarks.report import Figure
from tests.unit.evaluate.cases import CASE, LIMIT_SECONDS, invalid, live

from prfaas.errors import ConfigError
from prfaas.evaluate.case import arrivals_of, compared_load, rate_per_second, run_seconds, scenario_of
from prfaas.evaluate.disturbed import summarise_disturbed
from prfaas.evaluate.record import Run, RunKey
from prfaas.evaluate.summary import summarise
from prfaas.simulate.setup import capacity
from prfaas_sandbox.evaluate.campaign import folder_of
from prfaas_sandbox.evaluate.objects import check_live

MOST_SECONDS = 3600.0
SHORT_SECONDS = 300.0
START_SECONDS = 60.0
"""Of a sandbox, about."""
MINUTES: dict[PartName, float] = {
    "short": 4.0,
    "saturated": 52.8,
    "beside": 43.8,
    "steady": 50.9,
    "static": 20.9,
    "falls": 41.4,
    "swings": 41.4,
    "bursts": 41.4,
    "longloop": 21.6,
    "qwen": 40.9,
}
P90 = "P90 of PrfaaS-PD over homogeneous, at 90% of what the plan of that carries"


@pytest.fixture(scope="module")
def parts() -> dict[PartName, EvaluationPart]:
    return {name: part_of(name) for name in MINUTES}


@pytest.mark.parametrize("name", MINUTES)
def test_a_part_takes_an_hour_at_most_with_room_for_a_run_that_is_made_again(name, parts):
    case, runs = parts[name].case, parts[name].runs
    seconds = [run_seconds(case, key) for key in runs]

    assert sum(seconds) / 60 == pytest.approx(MINUTES[name], abs=0.5)
    assert sum(seconds) * (1 + 1 / len(runs)) < MOST_SECONDS


def test_the_short_form_takes_five_minutes_at_most_with_the_start_of_its_sandbox_and_has_figures(parts):
    short = parts["short"]
    seconds = [run_seconds(short.case, key) for key in short.runs]
    simulated = simulator_of(short.case)
    rows = summarise(short.case.file, list(map(simulated, short.runs)), None, short.limit_seconds).rows

    assert START_SECONDS + sum(seconds) <= SHORT_SECONDS
    assert [row.policy for row in rows if row.measured] == ["homogeneous", "threshold"]


@pytest.fixture
def some_folder(tmp_path, parts, monkeypatch):
    """Where the command keeps its runs, of parts that are made already."""
    monkeypatch.setattr(command, "STATE", tmp_path)
    monkeypatch.setattr(command, "part_of", lambda name, _: parts[name])
    return tmp_path


def test_the_long_form_serves_all_parts_but_the_short_one_in_turn(some_folder, parts, monkeypatch, capsys):
    served: list[EvaluationPart] = []

    def serve(part: EvaluationPart, _) -> list[Figure]:
        served.append(part)
        return [Figure(name="requests lost", value=0, unit="")]

    monkeypatch.setattr(EvaluationPart, "figures", serve)
    figures = list(command.figures(long=True))

    names = [name for name in MINUTES if name != "short"]
    assert [one.name for one in figures] == [f"{name}: requests lost" for name in names]
    assert served == [parts[name] for name in names], "and no conversations, of which there is no trace"
    assert capsys.readouterr().err.count("minutes of runs") == len(names)
    assert [one.name for one in command.figures("falls")] == ["requests lost"], "one part has no need of a name"
    with pytest.raises(ConfigError, match="one of both"):
        list(command.figures("falls", long=True))


def test_what_is_left_is_what_no_call_has_made(some_folder, parts):
    names: tuple[LongPartName, ...] = ("longloop", "falls")
    some = {name: parts[name] for name in names}
    longloop = parts["longloop"]
    (key,) = longloop.runs
    before = command.what_is_left(some)
    folder = folder_of(longloop.case, some_folder / "evaluation")
    folder.mkdir(parents=True)
    (folder / f"{key.name}.json").write_bytes(msgspec.json.encode(simulator_of(longloop.case)(key)))

    assert before.endswith(f"some {22 + 41} minutes of runs: longloop 22, falls 41")
    assert command.what_is_left(some).endswith("some 41 minutes of runs: falls 41")
    assert command.what_is_left({"longloop": longloop}) == "all runs of all parts are there"


@pytest.mark.parametrize("name", MINUTES)
def test_every_run_can_be_made_live(name, parts):
    for key in parts[name].runs:
        check_live(parts[name].case, scenario_of(parts[name].case, key))


def test_parts_serve_what_their_headlines_need(parts):
    names: tuple[PartName, ...] = ("saturated", "beside", "steady")
    saturated, beside, steady = ({(key.policy, key.load) for key in parts[name].runs} for name in names)

    assert saturated == {(policy, 1.3) for policy in ("threshold", "naive", "homogeneous")}
    assert beside == {("homogeneous", 0.9), ("threshold", compared_load(parts["beside"].case.file))}
    assert {load for _, load in steady} == {0.5, 0.7, 0.9}
    seeds = {(key.policy, key.load): set[int]() for name in names for key in parts[name].runs}
    for name in names:
        for key in parts[name].runs:
            seeds[key.policy, key.load].add(key.seed)
    assert all(there == {1, 2, 3} for (_, load), there in seeds.items() if load >= 0.9), "the most, and 90 %"


def test_an_overloaded_run_takes_the_time_of_its_queue_too():
    key = RunKey("homogeneous", 1.3, 1)
    last_seconds = max(one.at_seconds + one.seconds for one in live(key).answers)
    last_arrival = max(one.at_seconds for one in live(key).answers)

    assert run_seconds(CASE, key) == pytest.approx(CASE.stretch * last_seconds, rel=0.2)
    assert CASE.stretch * last_arrival < 0.75 * run_seconds(CASE, key), "the negative control: arrivals alone"


def figures(part: ComparedName, *keys: RunKey) -> dict[str, Figure]:
    made = summarise(CASE.file, [live(key) for key in keys], live, LIMIT_SECONDS)
    return {one.name: one for one in figures_of(made, part)}


def missing(part: ComparedName, *keys: RunKey) -> list[str]:
    return [
        name.removeprefix("there is none: ")
        for name, one in figures(part, *keys).items()
        if name.startswith("there is none") and one.reach is not None and one.value > one.reach
    ]


def test_a_headline_that_the_runs_of_its_part_do_not_give_misses():
    ours, theirs = RunKey("threshold", compared_load(CASE.file), 1), RunKey("homogeneous", 0.9, 1)

    assert missing("beside", ours) == [P90]
    assert missing("beside", ours, theirs) == []
    assert P90 in figures("beside", ours, theirs)
    assert missing("beside", RunKey("threshold", 0.5, 1), theirs) == [P90], "another rate"
    assert missing("saturated") == [
        "most requests/s, PrfaaS-PD over homogeneous",
        "most requests/s, PrfaaS-PD over naive",
    ]
    assert missing("qwen") == missing("saturated")
    assert missing("short") == []


def test_a_case_other_than_the_paper_s_has_no_gain_to_reach_and_stands_beside_its_plan():
    keys = [RunKey(policy, 1.5, 1) for policy in ("threshold", "homogeneous")]
    name = "most requests/s, PrfaaS-PD over homogeneous"
    other, paper = figures("qwen", *keys)[name], figures("saturated", *keys)[name]

    assert (other.reach, paper.reach) == (None, 1.5)
    assert other.value == paper.value
    assert other.rival_value == capacity(CASE.file, "threshold") / capacity(CASE.file, "homogeneous")


def test_each_ratio_has_its_interval_and_each_most_its_plan_and_simulator_beside_it():
    keys = [RunKey(policy, 1.5, 1) for policy in ("threshold", "homogeneous")]
    found = figures("saturated", *keys)
    name = "most requests/s, PrfaaS-PD over homogeneous"
    assert (
        found[f"{name}: low of its interval"].value < found[name].value < found[f"{name}: high of its interval"].value
    )

    for title, policy in (("PrfaaS-PD", "threshold"), ("homogeneous", "homogeneous")):
        off = {
            said: found[f"{title} at 150%: measured most requests/s beside {said}"] for said in ("planned", "simulated")
        }
        most = summarise(CASE.file, [live(RunKey(policy, 1.5, 1))], None, LIMIT_SECONDS).answers[policy].saturated
        assert off["planned"].value == pytest.approx(abs(most.value / capacity(CASE.file, policy) - 1))
        assert (off["simulated"].value, off["simulated"].reach) == (0.0, 0.05)
    carried = figures("saturated", RunKey("threshold", 0.5, 1))
    assert not any("most requests/s beside" in one for one in carried), "the negative control"


@pytest.fixture(scope="module")
def falls(parts) -> EvaluationPart:
    return parts["falls"]


@pytest.fixture(scope="module")
def simulated(falls):
    return simulator_of(falls.case)


def fallen(falls: EvaluationPart, simulated, *runs: Run) -> dict[str, Figure]:
    made = summarise_disturbed(falls.case, runs, simulated, falls.runs)
    return {one.name: one for one in disturbed.figures_of(made, "falls")}


def test_a_disturbed_case_says_how_soon_the_threshold_settles_and_what_it_gains(falls, simulated):
    found = fallen(falls, simulated, *map(simulated, falls.runs))

    assert found["requests lost"].value == found["runs without a figure"].value == 0
    settlings = [one for name, one in found.items() if name.startswith("intervals until")]
    assert [one.value for one in settlings] == [one.rival_value for one in settlings]
    ratios = [one for name, one in found.items() if "over the best threshold that stays" in name]
    assert len(ratios) == 2
    assert found["  the better of both"].value == min(one.value for one in ratios)
    assert not any(name.startswith("there is none") for name in found)


def test_the_best_threshold_that_stays_is_served_at_90_percent_where_it_has_nothing_to_reach(parts):
    static = parts["static"]
    simulated = simulator_of(static.case)
    made = summarise_disturbed(static.case, list(map(simulated, static.runs)), simulated, static.runs)
    found = {one.name: one for one in disturbed.figures_of(made, "static")}

    assert [(key.policy, key.load) for key in static.runs] == [
        (policy, 0.9) for policy in ("threshold", "price", "static", "static")
    ]
    assert rate_per_second(static.case, static.runs[0]) == rate_per_second(parts["steady"].case, static.runs[0])
    assert not any(name.startswith(("intervals", "there is none")) for name in found)
    better = "  the better of both"
    ours = made.over_best("threshold")
    assert found[better].value <= ours == found["P90 of PrfaaS-PD over the best threshold that stays"].rival_value
    bursts = {one.name: one for one in disturbed.figures_of(made, "bursts")}
    assert (found[better].reach, bursts[better].reach) == (None, 0.9)


def test_conversations_are_the_first_requests_of_a_trace_and_there_are_none_without_one(tmp_path, monkeypatch):
    monkeypatch.setattr(disturbed, "CONVERSATIONS", disturbed.CONVERSATIONS._replace(requests=30))
    path = tmp_path / "trace.jsonl"
    requests = [(n, [0, *range(1000 * n, 1000 * n + 2 * n)]) for n in range(1, 41)]
    lines = [
        {"timestamp": 100 * n, "input_length": 512 * len(blocks), "output_length": 9, "hash_ids": blocks}
        for n, blocks in requests
    ]
    path.write_bytes(msgspec.json.Encoder().encode_lines(lines))
    part = part_of("conversations", path)
    (key, *_) = part.runs
    served = list(arrivals_of(part.case, key, Random))

    assert part.command == "prfaas bench evaluation --part conversations --trace trace.jsonl"
    assert [(one.policy, one.load) for one in part.runs] == [
        (policy, 0.9) for policy in ("threshold", "price", "static", "static")
    ]
    assert [one.input_tokens for one in served] == [512 * len(blocks) + 1 for _, blocks in requests[:30]]
    assert all(one.blocks == tuple(blocks) for one, (_, blocks) in zip(served, requests, strict=False))
    assert 29 / served[-1].at_seconds == pytest.approx(rate_per_second(part.case, key))
    for run in part.runs:
        check_live(part.case, scenario_of(part.case, run))
    with pytest.raises(ConfigError, match="by --trace"):
        part_of("conversations")
    with pytest.raises(ConfigError, match="--part falls draws its requests"):
        part_of("falls", path)
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,4808,10\n")
    with pytest.raises(ConfigError, match="of Mooncake's form"):
        part_of("conversations", path)


def test_a_disturbed_case_without_all_thresholds_that_stay_has_no_ratio(falls, simulated):
    runs = list(map(simulated, falls.runs))
    for some in (runs[:-1], [*runs[:-1], invalid(runs[-1])]):
        found = fallen(falls, simulated, *some)
        assert found["runs without a figure"].value == 1
        assert "  the better of both" not in found
        assert "there is none: P90 of PrfaaS-PD over the best threshold that stays" in found


def test_an_invalid_moving_threshold_has_settled_nowhere(falls, simulated):
    first, *others = map(simulated, falls.runs)
    found = fallen(falls, simulated, invalid(first), *others)

    assert sum(name.startswith("there is none: intervals until") for name in found) == 2
    assert found["  the better of both"].value == found["P90 of by price over the best threshold that stays"].value
