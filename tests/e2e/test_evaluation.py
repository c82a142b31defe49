"""The evaluation's short form: two systems of a small case, live, whose requests and times all add up.

Its ratio is printed, and not a promise: a run of a minute has no steady state.
"""

from pathlib import Path
from random import Random
from statistics import median

import msgspec
import pytest

from prfaas.cli.plan import load
from prfaas.evaluate.case import Case, arrivals_of
from prfaas.evaluate.record import AnsweredRequest, Run, RunKey
from prfaas_sandbox.demo.install import ExampleInstallation, repository_root
from prfaas_sandbox.evaluate.live import LiveCase

from .checks import only_in_the_sandbox
from .conftest import LINK_MBPS

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="session")]

FILE = repository_root() / "examples/evaluation.yaml"
STRETCH = 2.0
CLIENT_SECONDS = 0.05 / STRETCH
"""Between client and gateway, through a forwarded port, which the gateway's parts do not hold."""
MOST_LATE = 0.1
"""Steps, of their time, and requests, of that to a first token: two cores may have other work, too, and no figure is
taken here."""
OFFLOADING, AT_HOME = RunKey("static", 0.7, 1), RunKey("homogeneous", 0.7, 1)


@only_in_the_sandbox
async def test_two_systems_answer_all_requests_in_the_time_of_their_profiles(
    installation: ExampleInstallation, tmp_path: Path
):
    file = load(FILE)
    scale = round(file.system.links[0].capacity_mbps / LINK_MBPS / STRETCH)
    case = Case(name="short", file=file, requests=16, stretch=STRETCH, cache_scale=scale)
    assert not await LiveCase(installation, case, tmp_path, print, tries=2).run_all([OFFLOADING, AT_HOME])
    runs = {
        key: msgspec.json.decode((tmp_path / f"{key.name}.json").read_bytes(), type=Run)
        for key in (OFFLOADING, AT_HOME)
    }
    for key, run in runs.items():
        asked = list(arrivals_of(case, key, Random))
        assert not run.lost
        assert [one.prompt_tokens for one in run.answers] == [1 + one.input_tokens for one in asked]  # it begins a text
        for is_away in {one.offloaded for one in run.answers}:
            left = [_left_share(one) for one in run.answers if one.offloaded == is_away]
            assert min(left) >= -0.05, "no part is counted twice"
            assert median(left) <= 0.05, "no part is missing"  # a single answer may come late
        assert not (why := _why_invalid(run)), f"{key.name}, tried twice: {why}; {run.machine}"
    away = [one.offloaded for one in runs[OFFLOADING].answers]
    assert any(away)
    assert not all(away)
    assert not any(one.offloaded for one in runs[AT_HOME].answers)
    ratio = _p90(runs[OFFLOADING]) / _p90(runs[AT_HOME])
    print(f"P90 of the time to the first token, offloading over at home: {ratio:.2f}")


def _left_share(one: AnsweredRequest) -> float:
    """Return the share of the time to a first token that is in none of its parts."""
    assert one.ttft_seconds is not None
    waited = one.ttft_seconds - one.sent_late_seconds  # the gateway does not know when it should have come
    return (waited - sum(one.parts.values())) / max(waited, CLIENT_SECONDS / 0.05)


def _why_invalid(run: Run) -> str:
    """Return why a run is invalid, of a machine that may be late by MOST_LATE in the mean."""
    steps_late = run.machine.mean_late
    sent_late = sum(one.sent_late_seconds for one in run.answers) / sum(one.ttft_seconds or 0.0 for one in run.answers)
    if steps_late is None or max(steps_late, sent_late) > MOST_LATE:
        return run.why_invalid
    in_time = msgspec.structs.replace(run.machine, mean_late=0.0, late_share=None, busy_share=None)
    sent = tuple(msgspec.structs.replace(one, sent_late_seconds=0.0) for one in run.answers)
    return msgspec.structs.replace(run, machine=in_time, answers=sent).why_invalid


def _p90(run: Run) -> float:
    waited = sorted(one.ttft_seconds for one in run.answers if one.ttft_seconds is not None)
    return waited[int(0.9 * len(waited))]
