"""Runs one after the other: the link is whole again, a record comes before the pods go, and one failure is one."""

import asyncio
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from prfaas.errors import ConfigError, PeerError
from prfaas.evaluate.case import Case, scenario_of
from prfaas.evaluate.record import Run, RunKey
from prfaas.simulate.scenario import LinkShape
from prfaas_sandbox.demo.install import ExampleInstallation
from prfaas_sandbox.environment import Environment
from prfaas_sandbox.evaluate import made_with, readings
from prfaas_sandbox.evaluate.campaign import read_case
from prfaas_sandbox.evaluate.drive import Driver
from prfaas_sandbox.evaluate.live import LiveCase, changing_link
from prfaas_sandbox.evaluate.objects import CaseScale, live_mbps

from .evaluated import ROOT, NotedClusters, World, lateness

STATIC, AT_HOME = RunKey("static", 0.7, 1), RunKey("homogeneous", 0.7, 1)
IN_TIME = {**lateness("a", "prefill", 9, 0.0), **lateness("b", "decode", 9, 0.0), **lateness("c", "decode", 9, 0.0)}


def small_case() -> Case:
    """A case that is over in no time."""
    return read_case(ROOT / "examples/evaluation.yaml", requests=20, stretch=0.001, cache_scale=20)


@pytest.fixture(autouse=True)
def nothing_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scrapes come at once, and no git is asked for the commit."""
    monkeypatch.setattr(made_with, "_git", lambda *_words: "")
    for name in ("_SCRAPE_SECONDS", "_READ_SECONDS"):
        monkeypatch.setattr(readings, name, 0.0)


class Counted(World):
    """A world in which each instance makes ten steps more, in time, whenever somebody looks."""

    async def answer(self, request: Any):
        for labels in self.counters:
            self.counters[labels] += 0 if labels[0].endswith("_sum") else 10
        return await super().answer(request)


def live(
    world: World, folder: Path, clusters: NotedClusters | None = None, tries: int = 1
) -> tuple[LiveCase, Any, list[str]]:
    """Its runs are too short for their requests to be sent in time, so one try has to do."""
    said: list[str] = []
    clusters = clusters or NotedClusters(world)
    return LiveCase(cast(ExampleInstallation, clusters), small_case(), folder, said.append, tries), clusters, said


class WatchedClusters(NotedClusters):
    """Notes beside each removal which runs are written."""

    def __init__(self, world: World, folder: Path):
        super().__init__(world)
        self.folder = folder
        self.written: list[list[str]] = []

    def _note(self, what: str) -> None:
        super()._note(what)
        if what.startswith("hub prfaas delete"):
            self.written.append([path.name for path in self.folder.iterdir()])


async def test_runs_are_whole_and_written_before_their_pods_go(tmp_path: Path):
    async with Counted.serving() as world:
        world.counters = dict(IN_TIME)
        case, clusters, _ = live(world, tmp_path, WatchedClusters(world, tmp_path))
        assert not await case.run_all([STATIC])
    assert clusters.written == [[], [f"{STATIC.name}.json"]]
    run = msgspec.json.decode((tmp_path / f"{STATIC.name}.json").read_bytes(), type=Run)
    assert (len(run.answers), run.lost, run.machine.why_invalid) == (20, (), "")
    assert run.readings[0].at_seconds == pytest.approx(0.0, abs=5.0)
    assert "restore" in clusters.noted[: clusters.noted.index("ready prfaaspolicy")]


class StuckClusters(NotedClusters):
    """Pods that have been ready do not go."""

    are_stuck = True

    def _note(self, what: str) -> None:
        super()._note(what)
        if self.are_stuck and what.startswith("hub prfaas delete") and "ready prfaaspolicy" in self.noted:
            raise PeerError("they are still there")


async def test_a_run_counts_though_its_pods_do_not_go_and_the_next_one_waits_for_that(tmp_path: Path):
    async with Counted.serving() as world:
        world.counters = dict(IN_TIME)
        case, clusters, said = live(world, tmp_path, StuckClusters(world))
        assert not await case.run_all([STATIC])
        assert (tmp_path / f"{STATIC.name}.json").exists()
        assert any("have not gone yet: they are still there" in line for line in said)
        assert await case.run_all([AT_HOME]) == {AT_HOME: "they are still there"}, "it would meet them"
        clusters.are_stuck = False
        assert not await case.run_all([AT_HOME])


async def test_a_folder_that_takes_no_run_ends_all(tmp_path: Path):
    async with Counted.serving() as world:
        world.counters = dict(IN_TIME)
        case, clusters, _ = live(world, tmp_path / "not there")
        with pytest.raises(ConfigError, match=r"static-70-1\.json cannot be written.*make room"):
            await case.run_all([STATIC, AT_HOME])
    assert clusters.noted.count("ready prfaaspolicy") == 1
    assert clusters.noted[-1].startswith("hub prfaas delete"), "no pod stays"


async def test_errors_of_several_requests_are_one_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    async def fail(*_: object) -> None:
        raise ExceptionGroup("errors in a TaskGroup", [ValueError("an odd answer"), ValueError("another")])

    monkeypatch.setattr(Driver, "run", fail)
    async with Counted.serving() as world:
        case, _, _ = live(world, tmp_path)
        assert await case.run_all([STATIC]) == {STATIC: "an odd answer"}


async def test_the_link_is_the_same_for_a_system_that_does_not_use_it(tmp_path: Path):
    """A call that resumes with homogeneous alone declares the link for all."""
    async with Counted.serving() as world:
        world.counters = dict(IN_TIME)
        case, clusters, _ = live(world, tmp_path)
        assert not await case.run_all([STATIC, AT_HOME])
    shaped = [what for what in clusters.noted if what.startswith("shape")]
    assert shaped == [f"shape {live_mbps(small_case()):g}"] * 2
    files = [(tmp_path / f"{key.name}.json").read_bytes() for key in (STATIC, AT_HOME)]
    assert {msgspec.json.decode(one, type=Run).link_mbps for one in files} == {live_mbps(small_case())}


async def test_a_run_that_fails_leaves_nothing_and_the_others_go_on(tmp_path: Path):
    async with Counted.serving() as world:
        world.counters = dict(IN_TIME)
        case, clusters, said = live(world, tmp_path)
        clusters.fails = ["ready"]
        failed = await case.run_all([STATIC, AT_HOME])
    assert failed == {STATIC: "ready prfaaspolicy failed"}
    assert [path.name for path in tmp_path.iterdir()] == [f"{AT_HOME.name}.json"]
    deletes = [place for place, what in enumerate(clusters.noted) if what.startswith("hub prfaas delete")]
    assert len(deletes) == 4, "before and after each of both"
    assert deletes[-1] == len(clusters.noted) - 1
    assert any(line.startswith(f"{STATIC.name} failed") for line in said)


async def test_an_invalid_run_is_made_once_more_and_kept(tmp_path: Path):
    async with World.serving() as world:
        case, clusters, said = live(world, tmp_path, tries=2)
        assert not await case.run_all([STATIC])
    assert sum(what == "ready prfaaspolicy" for what in clusters.noted) == 2
    assert sum("is invalid" in line for line in said) == 2
    assert msgspec.json.decode((tmp_path / f"{STATIC.name}.json").read_bytes(), type=Run).machine.why_invalid


async def change(steps: tuple[tuple[float, float], ...], *fails: str) -> list[str]:
    scenario = scenario_of(small_case(), STATIC)
    scenario = msgspec.structs.replace(scenario, conditions={"between-clusters": LinkShape(schedule=steps)})
    clusters = NotedClusters(World())
    clusters.fails = [*fails]
    async with changing_link(cast(Environment, clusters), scenario, CaseScale(stretch=2.0, cache_scale=10)):
        for _ in range(20):
            await asyncio.sleep(0)  # let the link change
    return clusters.noted


async def test_the_link_follows_its_schedule_until_the_run_ends():
    assert await change(((0.0, 200.0), (0.0, 0.0), (0.0, 400.0), (1e6, 1.0))) == [
        *("shape 10", "restore", "cut", "shape 20", "restore")
    ]


async def test_a_link_that_could_not_be_changed_fails_the_run():
    with pytest.raises(PeerError, match="shape 10 failed"):
        await change(((0.0, 200.0),), "shape")
