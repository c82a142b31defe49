"""Proves that every mistake in a plan file is answered with field, value and fix, and that none yields a NaN."""

import copy
import math
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.unit.capacity.systems import no_traces, paper_document

from prfaas.capacity import planfile
from prfaas.capacity.comparison import Comparison, compare
from prfaas.capacity.planfile import PlanFile
from prfaas.capacity.workload import Workload
from prfaas.errors import ConfigError

DOCUMENT = paper_document()
MISSING = object()
FEW_LENGTHS = {"histogram": {"edgesTokens": [0, 1_000, 20_000, 100_000], "counts": [5, 3, 2]}, "outputTokens": 100}


def changed(path: str, value: object) -> dict[str, Any]:
    """Return the paper's file with one field set, or without it; numbers in the path are places in lists."""
    document = copy.deepcopy(DOCUMENT)
    *parents, last = [int(part) if part.isdigit() else part for part in path.split(".")]
    inner: Any = document
    for part in parents:
        inner = inner[part]
    if value is MISSING:
        inner.pop(last, None)
    else:
        inner[last] = value
    return document


def read(document: object) -> PlanFile:
    return planfile.read(document, no_traces)


def test_a_trace_holds_its_answers_too_and_a_histogram_its_middles():
    document = changed("workload", {"trace": "some.jsonl"})
    file = planfile.read(document, lambda path: [(100, 10), (300, 30)] if path == "some.jsonl" else [])
    assert (file.workload.lengths, file.system.output_tokens) == ([100, 300], 20)
    binned = {"histogram": {"edgesTokens": [0, 100, 300], "counts": [3, 1]}, "outputTokens": 7}
    file = read(changed("workload", binned))
    assert (list(file.workload.items()), file.system.output_tokens) == ([(50, 0.75), (200, 0.25)], 7)


def test_forwards_what_only_a_simulator_reads():
    assert read({**DOCUMENT, "simulation": {"seed": 1}}).simulation == {"seed": 1}


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        (
            "links.0.capacityMbps",
            "12.5 GB/s",
            r"capacityMbps is '12.5 GB/s'; write the number alone, in Mbit/s: 100000",
        ),
        ("links.0.capacityMbps", "100 Gbit/s", "in Mbit/s: 100000"),
        ("links.0.capacityMbps", "fast", "write a number alone, in Mbit/s"),
        ("links.0.capacityMbps", 0, "capacityMbps is 0; it must be above 0"),
        ("links.0.capacityMbps", math.nan, "finite number"),
        (
            "links.0.capacityMbps",
            10,
            "capacityMbps is 10: the cache of a mean prompt, 62[0-9] MiB, would take 52[0-9] s; ",
        ),
        ("links.0.capacityMbps", 25, "if these are Gbit/s, write 25000, else give prfaas 0 instances"),
        ("links.0.capacityMbps", 10e9, "capacityMbps is 1e.10: no link carries 100 Tbit/s, so this looks like bit/s"),
        ("links.0.capacityMBps", 12_500, "capacityMBps is no field here; it is capacityMbps, in Mbit/s: multiply by 8"),
        ("links.0.capacityGbps", 100, "multiply by 1000"),
        ("profiles.h200.points.0.cacheMB", 200, "it is cacheMib, in MiB: multiply by 0.95367"),
        ("profiles.h200.points.3.seconds", 1.2, "seconds falls from 1.84 at 32768 tokens to 1.2 at 131072"),
        ("profiles.h200.points.3.cacheMib", 1, "cacheMib falls from 701.3"),
        ("profiles.h200.points.1.tokens", 1024, "1024 tokens twice"),
        ("profiles.h200.points.1.seconds", 0, "above 0"),
        ("profiles.h200.points", [{"tokens": 1, "seconds": 1, "cacheMib": 1}], "holds 1; measure at least two"),
        ("profiles.h20.tokenSeconds", -1e-4, "never fall with its length"),
        ("profiles.h20.tokenSeconds", 145, "look like milliseconds"),
        ("profiles.h20.tokenBytes", 10**9, "no cache is that large"),
        ("profiles.h20.stateBytes", 1.5, "whole number"),
        ("profiles.h20.tokenSeconds", MISSING, "h20 has none of points, tokenSeconds"),
        ("offloadPools.0.instances", "four", "instances is 'four'; it must be a number"),
        ("offloadPools.0.instances", True, "instances is True"),
        ("offloadPools.0.profile", "h100", "is 'h100'; there are: h200, h20"),
        ("offloadPools.0.link", "other", "is 'other'; links are: between-datacentres"),
        ("offloadPools.0.replicas", 4, "replicas is no field here"),
        ("hub", [], "hub has no instances, so nothing would decode"),
        ("hub.0.instances", 0, "hub has no instances, so nothing would decode; give one of its pools at least one"),
        ("hub.0.stepMillis", 25_000, "more than 10 s"),
        ("hub.0.stepMillis", 0.025, "stepMillis is 0.025: no step is that quick, so this looks like seconds; write 25"),
        (
            "workload.lognormal.maxTokens",
            300_000,
            "prfaas.profile was measured up to 131,072 tokens and prompts reach 299,[0-9]+, .*; measure one",
        ),
        ("slo.ttftMillis", "90 %", "write a number alone, in milliseconds"),
        ("workload.lognormal.sigma", "90 %", "if it is a share, write it as a fraction: 0.9"),
        ("hub.0.stepMillis", MISSING, "stepMillis is missing; add it"),
        ("hub.0.stepSeconds", 0.025, r"it is stepMillis"),
        ("hub.0.minPrefill", 9, "do not fit into 8 instances"),
        ("hub.0.minPrefill", 8, "none can decode"),
        ("hub", "pd", "hub is 'pd'; it must be a list"),
        ("slo.tpotMillis", 20, "slo.tpotMillis is 20, but a step of hub.pd takes stepMillis 25"),
        ("slo.ttftMillis", 0, "above 0, or absent"),
        ("workload.outputTokens", 0, "outputTokens is 0"),
        ("workload.trace", "some.jsonl", "lognormal and trace"),
        ("workload.lognormal.mu", 27_000, r"mean of ln\(tokens\)"),
        ("workload.lognormal.sigma", "one", "sigma is 'one'"),
        ("offloadPools.0.costPerHour", 0, "costPerHour is 0; it must be above 0"),
        ("offloadPools.0.costPerHour", "2 EUR", "costPerHour is '2 EUR'"),
        ("published.baseline", {}, "systems are hub_alone, homogeneous"),
        ("offload", [], "did you mean offloadPools"),
    ],
)
def test_a_mistake_is_answered_with_field_value_and_fix(path, value, says):
    with pytest.raises(ConfigError, match=says):
        read(changed(path, value))


def test_prompts_up_to_twice_as_long_as_measured_and_links_that_are_only_slow_are_planned():
    """Negative control of the refusals of both."""
    assert read(changed("workload.lognormal.maxTokens", 262_144)).workload.max_tokens > 250_000
    assert read(changed("links.0.capacityMbps", 200)).system.links[0].capacity_mbps == 200
    assert read(changed("links.0.capacityMbps", 1e8)).system.links[0].capacity_mbps == 1e8


def test_lengths_that_no_prompt_has_need_not_be_measured():
    bins = {"edgesTokens": [0, 1_000, 20_000, 100_000, 1_000_000], "counts": [5, 3, 2, 0]}
    read(changed("workload", {"histogram": bins, "outputTokens": 100}))
    with pytest.raises(ConfigError, match="prompts reach 550,000"):
        read(changed("workload", {"histogram": bins | {"counts": [5, 3, 2, 1]}, "outputTokens": 100}))


@pytest.mark.parametrize(("times", "said"), [(8, "8 times"), (1 / 8, "8 times"), (1024, "1.02e.03 times")])
def test_caches_in_another_unit_than_those_of_other_pools_are_refused(times, said):
    document = changed("slo", {})
    for one in document["profiles"]["h200"]["points"]:
        one["cacheMib"] *= times
    large, small = ("offloadPools.prfaas", "hub.pd") if times > 1 else ("hub.pd", "offloadPools.prfaas")
    with pytest.raises(
        ConfigError, match=rf"{large}.profile: the cache of 27,486 tokens .* {said} as much as in {small}"
    ):
        read(document)


@pytest.mark.parametrize("times", [0.5, 1, 3])
def test_caches_that_are_compressed_or_of_another_precision_are_planned(times):
    """Negative control."""
    document = changed("slo", {})
    for one in document["profiles"]["h200"]["points"]:
        one["cacheMib"] *= times
    read(document)


def test_lengths_that_come_later_and_were_not_measured_are_noted():
    file = read(DOCUMENT)
    said = "The profile of prfaas was measured up to 131072 tokens; prompts reach {}, where it is a guess."
    for longest, is_said in ((500_000, True), (262_144, False)):
        workload = Workload([1_000, longest], [9, 1])
        assert (said.format(longest) in compare(msgspec.structs.replace(file, workload=workload)).notes) == is_said


@pytest.mark.parametrize("document", [None, [], "text", 3])
def test_a_document_that_is_no_mapping_is_refused(document):
    with pytest.raises(ConfigError, match="the file is"):
        read(document)


def test_numbers_that_yaml_reads_as_text_are_numbers():
    assert read(changed("profiles.h20.tokenSeconds", "1e-4")).system.hub[0].profile.token_seconds == 1e-4


def test_an_slo_that_no_rate_keeps_is_refused_and_one_that_some_keep_says_how_many():
    with pytest.raises(ConfigError, match=r"slo.ttftMillis is 500"):
        compare(read(changed("slo.ttftMillis", 500)))
    rates = compare(read(changed("slo.ttftMillis", 5000))).arrivals_within_slo
    assert rates is not None
    assert rates["homogeneous"] is None
    assert 1.8 < (rates["prfaas_pd"] or 0) < 2.8


def test_a_link_that_limits_is_pointed_out_with_the_usual_mistake():
    notes = compare(read({**changed("links.0.capacityMbps", 1_000), "workload": FEW_LENGTHS})).notes
    assert any("capacityMbps, 1000, limits offload" in note and "multiply it by 8" in note for note in notes)
    others = compare(read({**DOCUMENT, "workload": FEW_LENGTHS})).notes
    assert [note.partition(":")[0] for note in others] == ["Memory was not checked for prfaas, pd"]


PATHS = [
    "workload.outputTokens",
    "profiles.h200.points.0.seconds", "profiles.h200.points.3.cacheMib", "profiles.h20.fixedSeconds",
    "profiles.h20.tokenSeconds", "profiles.h20.stateBytes", "links.0.capacityMbps", "offloadPools.0.instances",
    "hub.0.instances", "hub.0.maxBatch", "hub.0.stepMillis", "hub.0.minDecode", "hub.0.costPerHour", "slo",
]  # fmt: skip
values = st.one_of(
    st.floats(), st.integers(-2, 300), st.sampled_from([None, "x", "1 GB/s", [], {}, 1e308, 1e-308, MISSING])
)


def figures_of(value: Any) -> list[float]:
    if isinstance(value, float):
        return [value]
    if isinstance(value, dict):
        return [figure for inner in value.values() for figure in figures_of(inner)]
    if isinstance(value, list | tuple):
        return [figure for inner in value for figure in figures_of(inner)]
    return [figure for name in getattr(value, "__struct_fields__", ()) for figure in figures_of(getattr(value, name))]


def outcome(document: object) -> str | Comparison:
    try:
        return compare(read(document))
    except ConfigError as error:
        return str(error)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.sampled_from(PATHS), values)
def test_any_value_of_a_field_gives_a_whole_table_or_a_message(path, value):
    document = changed(path, value)
    if "workload" not in path:
        document["workload"] = FEW_LENGTHS
    found = outcome(document)
    assert len(found) > 20 if isinstance(found, str) else all(map(math.isfinite, figures_of(found)))


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(["mu", "sigma", "minTokens", "maxTokens"]), values)
def test_any_lognormal_has_a_mean_or_a_message(field, value):
    try:
        mean = read(changed(f"workload.lognormal.{field}", value)).workload.mean_tokens
    except ConfigError:
        return
    assert 1 <= mean <= 1 << 30
