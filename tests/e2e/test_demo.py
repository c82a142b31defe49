"""Proves that `prfaas demo` shows what it promises, leaves its report, ends with 0, and cleans up after itself."""

import asyncio
import json
import sys
from pathlib import Path

import pytest

from prfaas_sandbox.demo.records import DemoResults, FailureDrill, RequestRecord, StreamDrill, find_problems
from prfaas_sandbox.demo.steps import SENT_BYTES_QUERY, ThresholdSampler

pytestmark = pytest.mark.e2e


def processes_under(folder: Path) -> list[str]:
    """Return the command lines of live processes that mention `folder`."""
    found: list[str] = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            if str(folder) in line:
                found.append(line)
    return found


@pytest.mark.timeout(420)
async def test_the_demo_shows_what_it_promises_and_cleans_up(tmp_path: Path):
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "prfaas.cli.main", "demo", "--state", str(tmp_path),
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    output, _ = await asyncio.wait_for(process.communicate(), 400)
    assert process.returncode == 0, output.decode()[-4000:]
    report = json.loads((tmp_path / "demo.json").read_bytes())
    assert report["problems"] == []
    for key in ("id", "tokens", "decision", "kv_bytes", "ttft_seconds", "outcome"):
        assert all(key in request for request in report["requests"])
    assert {request["decision"] for request in report["requests"]} == {"local", "offload"}
    assert len(report["threshold"]) > 10
    assert report["failure_drill"]["request"]["outcome"] == "fallback"
    assert processes_under(tmp_path) == []


def test_the_verdict_names_every_promise_that_an_empty_story_breaks():
    problems = find_problems(DemoResults())
    assert len(problems) >= 6
    assert all(FailureDrill.__name__ not in problem for problem in problems)


@pytest.mark.parametrize(
    ("text", "tokens", "events", "problem"),
    [
        ("abcd", 4, 2, ""),
        ("abxy", 4, 2, ""),  # a near-tie after the kill
        ("axcd", 4, 2, "began with another text"),
        ("abc", 3, 2, "shorter"),
        ("abcd", 4, 4, "in the middle of a stream"),
    ],
)
def test_the_verdict_on_vllm_asks_for_every_token_of_the_broken_stream(text, tokens, events, problem):
    undisturbed = RequestRecord(id="u", act="undisturbed", outcome="ok", output_tokens=4, text="abcd")
    request = RequestRecord(id="k", act="killed", outcome="ok", output_tokens=tokens, text=text)
    drill = StreamDrill(undisturbed=undisturbed, request=request, killed_pod="p", events_before_kill=events)
    found = find_problems(DemoResults(engine="vllm", stream_drill=drill))
    about_streams = [each for each in found if "stream" in each]
    assert [problem in each for each in about_streams] == ([True] if problem else [])


async def test_crossed_bytes_count_once_over_gaps_and_restarts(monkeypatch: pytest.MonkeyPatch):
    seen = iter([100.0, 250.0, None, 250.0, None, 40.0, 60.0])

    async def query(self: ThresholdSampler, promql: str) -> float | None:
        return next(seen) if promql == SENT_BYTES_QUERY else None

    monkeypatch.setattr(ThresholdSampler, "query", query)
    sampler = ThresholdSampler("http://127.0.0.1:1", [].append)
    for _ in range(7):
        await sampler._sample()
    assert sampler.crossed_bytes == 250 + 60
