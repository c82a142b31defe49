"""Proves that outside tools get the requests that ours gets, that results are read, and that far off is a miss."""

import json
import random
import re

import pytest
from benchmarks.evaluation.compared import SHORT
from benchmarks.outside import cache_simulator, environments, installation, load_tools
from benchmarks.outside.cache_simulator import AttentionCache, hit_figures, hit_rate
from benchmarks.outside.installation import LEAD_SECONDS, OURS, Load, by_the_clock, load_figures, schedule, seen_of
from benchmarks.outside.load_tools import LOAD_TOOLS, Seen, schedule_lines
from benchmarks.prefix_cache import Line
from benchmarks.report import Figure

from prfaas.errors import PeerError
from prfaas.evaluate.record import AnsweredRequest
from prfaas.simulate.cache import PrefixCache
from prfaas.simulate.request import Arrival
from prfaas_sandbox.demo.install import repository_root
from prfaas_sandbox.evaluate.campaign import read_case

ROOT = repository_root()
REQUESTS = [Arrival(0.0, 600, 16), Arrival(2.5, 1_024, 16)]
OURS_SAW = Seen(201, 0.8, 2.0, 2.7)


@pytest.mark.parametrize("tool", environments.SHOWN)
def test_a_tool_is_locked_at_the_version_that_is_asked_for_and_named(tool: str):
    lock = environments.lock_of(tool).read_text()
    wanted = (environments.HERE / f"{tool}.in").read_text()

    assert f"{tool}=={environments.version_of(tool)}\n" in wanted
    assert "://" not in lock
    assert re.findall(r"^\S+==\S+(?! \\)$", lock, re.MULTILINE) == [], "each package has hashes"
    assert f"{tool} {environments.version_of(tool)}" in (ROOT / "docs/understand/outside.md").read_text()


def schedule_of(is_verbatim: bool) -> list[dict]:
    return [json.loads(line) for line in schedule_lines(REQUESTS, is_verbatim, random.Random(1))]


def test_a_schedule_has_the_times_and_lengths_of_the_requests_and_shares_no_prompt():
    lengths, texts = schedule_of(is_verbatim=False), schedule_of(is_verbatim=True)

    assert [(one["timestamp"], one["output_length"]) for one in lengths] == [(0, 16), (2500, 16)]
    assert [(one["input_length"], one["hash_ids"]) for one in lengths] == [(600, [0, 1]), (1_024, [2, 3])]
    assert [len(one["text_input"]) for one in texts] == [600, 1_024]
    assert texts[0]["text_input"] != texts[1]["text_input"][:600]
    assert not {"input_length", "hash_ids"} & texts[0].keys(), "aiperf takes the one or the other"


def test_one_request_comes_alone_before_a_run():
    first, *rest = schedule(read_case(ROOT / SHORT.file, 20, SHORT.stretch, SHORT.cache_scale))
    words = " ".join((ROOT / "docs/understand/outside.md").read_text().split())

    assert f"{installation.REQUESTS} requests come at random" in words
    assert (first.at_seconds, len(rest)) == (0.0, 20)
    assert first.input_tokens == min(one.input_tokens for one in rest)
    assert rest[0].at_seconds >= LEAD_SECONDS


RESULTS = {
    "vllm": {"completed": 201, "mean_ttft_ms": 800.0, "p90_ttft_ms": 2000.0, "request_throughput": 2.7},
    "aiperf": {
        "request_count": {"avg": 201.0},
        "time_to_first_token": {"avg": 800.0, "p90": 2000.0},
        "request_throughput": {"avg": 2.7},
    },
    "guidellm": {
        "benchmarks": [
            {
                "metrics": {
                    "request_totals": {"successful": 201, "errored": 3},
                    "time_to_first_token_ms": {"successful": {"mean": 800.0, "percentiles": {"p90": 2000.0}}},
                    "requests_per_second": {"successful": {"mean": 2.7}},
                }
            }
        ]
    },
}
"""What the tools wrote, of which the fields that are read."""


@pytest.mark.parametrize("tool", LOAD_TOOLS)
def test_the_result_of_a_tool_is_read_in_seconds(tool: str):
    assert LOAD_TOOLS[tool].read(RESULTS[tool]) == OURS_SAW


def test_our_load_maker_counts_from_when_requests_were_due_by_the_clock_on_which_tools_send():
    assert [one.at_seconds for one in by_the_clock(REQUESTS)] == [0.0, 5.0]

    waits = [0.1 * number for number in range(1, 12)]
    answers = [
        AnsweredRequest(at_seconds=number, prompt_tokens=9, ttft_seconds=wait, seconds=2.0)
        for number, wait in enumerate(waits)
    ]
    lost = AnsweredRequest(at_seconds=11, prompt_tokens=9, lost="failure", error="503: nothing serves")

    answered, mean, p90, rate = seen_of([*answers, lost])

    assert (answered, mean, p90, rate) == (11, pytest.approx(1.2), pytest.approx(2.0), pytest.approx(11 / 24))
    with pytest.raises(PeerError, match="503: nothing serves"):
        seen_of([lost])


def missed(figures: dict[str, Load]) -> list[str]:
    return [one.name for one in load_figures(figures) if one.reach is not None and one.value > one.reach]


def test_a_tool_that_is_more_than_five_percent_off_is_a_miss():
    ours = Load(201, OURS_SAW, "")
    near = Load(201, Seen(201, 0.77, 2.08, 2.75), "")
    far = Load(201, Seen(200, 0.75, 2.12, 2.5), "the machine was too slow")
    label = load_tools.label_of("guidellm")

    assert missed({OURS: ours, "guidellm": near}) == []
    assert missed({OURS: ours, "guidellm": far}) == [
        f"{label}: {what}"
        for what in (
            "runs that give no figure",
            "requests without an answer",
            "mean TTFT, off ours by",
            "P90 of TTFT, off ours by",
            "throughput, off ours by",
        )
    ]


CONVERSATION = [Line(1_024, [1, 2]), Line(1_024, [1, 2]), Line(1_500, [1, 2, 3]), Line(2_000, [1, 2, 3, 4])]
"""In the later half, 1,024 of 1,500 tokens are known, and as many of 2,000: the third block was not full before."""


def test_a_hit_rate_is_of_the_later_half_and_needs_no_state_beside_the_tool():
    def rate(cache: PrefixCache) -> float:
        return hit_rate(CONVERSATION, cache)

    assert rate(AttentionCache(1e9, 512, 10, 0)) == (1_024 + 1_024) / 3_500
    assert rate(PrefixCache(1e9, 512, 10, 5)) == (1_024 + 1_024) / 3_500
    assert rate(AttentionCache(512 * 10, 512, 10, 0)) == (512 + 512) / 3_500, "room for one block"
    assert rate(PrefixCache(512 * 10, 512, 10, 5)) == 0.0, "and none for a state"


def test_a_hit_rate_that_is_off_is_a_miss_and_so_is_a_cache_that_the_tool_left_out():
    def found(hits: int) -> dict[str, Figure]:
        point = {"gib": 128.0, "results": {"lru": {"hitRate": hits / 3_500}}}
        made = hit_figures("tool", CONVERSATION, {"points": [point], "hitRateCeiling": 2_048 / 3_500})
        return {one.name: one for one in made}

    off = "kimi-k3, 128 GiB: hit rate of attention alone, off by"
    assert found(2_048)[off].value == 0
    assert found(1_900)[off].value > cache_simulator.REACH
    assert (found(2_048)["tool: caches compared"].value, len(cache_simulator.BUDGETS_GIB)) == (1, 3)
