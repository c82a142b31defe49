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
from prfaas.evaluate.record import Run, RunKey
from prfaas_sandbox.demo.install import ExampleInstallation, repository_root
from prfaas_sandbox.evaluate.live import LiveCase

from .checks import only_in_the_sandbox
from .conftest import LINK_MBPS

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="session")]

FILE = repository_root() / "examples/evaluation.yaml"
STRETCH = 2.0
CLIENT_SECONDS = 0.05 / STRETCH
"""Between client and gateway, through a forwarded port, which the gateway's parts do not hold."""
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
        off = list[float]()
        for one in run.answers:
            assert one.ttft_seconds is not None
            waited = one.ttft_seconds - one.sent_late_seconds  # the gateway does not know when it should have come
            off.append(abs(sum(one.parts.values()) - waited) / max(waited, CLIENT_SECONDS / 0.05))
            assert sum(one.parts.values()) == pytest.approx(waited, rel=0.05, abs=4 * CLIENT_SECONDS), "one may be late"
        assert median(off) <= 0.05
        assert not run.why_invalid, f"{key.name}, tried twice: {run.why_invalid}; {run.machine}"
    away = [one.offloaded for one in runs[OFFLOADING].answers]
    assert any(away)
    assert not all(away)
    assert not any(one.offloaded for one in runs[AT_HOME].answers)
    ratio = _p90(runs[OFFLOADING]) / _p90(runs[AT_HOME])
    print(f"P90 of the time to the first token, offloading over at home: {ratio:.2f}")


def _p90(run: Run) -> float:
    waited = sorted(one.ttft_seconds for one in run.answers if one.ttft_seconds is not None)
    return waited[int(0.9 * len(waited))]
