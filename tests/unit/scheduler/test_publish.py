"""Only the holder writes: at once when something turned, else every ten seconds; a failing API server is survived."""

import json

import pytest
from aiohttp import web
from tests.clocks import Clock
from tests.serving import serving

from prfaas.conditions import ConditionState
from prfaas.kube import KubeSession
from prfaas_scheduler import status
from prfaas_scheduler.status import Publisher, Report, policy_ref

LEASES = "/apis/coordination.k8s.io/v1/namespaces/prfaas/leases"
POLICY = "/apis/prfaas.io/v1alpha1/namespaces/prfaas/prfaaspolicies/kimi"
EARLIER = "2026-01-01T00:00:00Z"


class ApiServer:
    """As much of an API server as a Lease and a status need."""

    def __init__(self):
        self.lease: dict | None = None
        self.version = 0
        self.writes: list[dict] = []
        self.conditions = [{"type": "LinkHealthy", "status": "True", "lastTransitionTime": EARLIER}]
        self.failing = 0

    async def handle(self, request: web.Request) -> web.Response:
        if self.failing:
            return web.json_response({"kind": "Status", "message": "etcd is away"}, status=self.failing)
        if request.path.startswith(LEASES):
            return await self._lease(request)
        if request.method == "PATCH" and request.path == f"{POLICY}/status":
            assert request.query == {"fieldManager": "prfaas-scheduler", "force": "true"}
            assert request.content_type == "application/apply-patch+yaml"
            body = json.loads(await request.read())
            assert (body["apiVersion"], body["kind"], body["metadata"]) == (
                "prfaas.io/v1alpha1",
                "PrfaaSPolicy",
                {"name": "kimi", "namespace": "prfaas"},
            )
            self.writes.append(body["status"])
            self.conditions = self.writes[-1]["conditions"]
            return web.json_response({})
        assert (request.method, request.path) == ("GET", f"{POLICY}/status")
        return web.json_response({"status": {"conditions": self.conditions}})

    async def _lease(self, request: web.Request) -> web.Response:
        if request.method == "GET":
            if self.lease is None:
                return web.json_response({"reason": "NotFound", "message": "no"}, status=404)
            return web.json_response(self.lease)
        self.version += 1
        self.lease = json.loads(await request.read())
        self.lease["metadata"]["resourceVersion"] = str(self.version)
        return web.json_response(self.lease)


class World:
    """A publisher, its API server, its clock, and what the loop would report."""

    def __init__(self, api, publisher, clock):
        self.api = api
        self.publisher = publisher
        self.clock = clock
        self.report: Report | None = None

    async def run(self, seconds: float) -> None:
        for _ in range(round(seconds * 2)):
            await self.publisher.once()
            self.clock.seconds += 0.5


@pytest.fixture
async def world():
    api, clock = ApiServer(), Clock(50.0)
    async with serving(api.handle) as url, KubeSession(url) as session:
        publisher = Publisher(session, policy_ref("prfaas", "kimi"), "pod-a", lambda: made.report, clock)
        made = World(api, publisher, clock)
        yield made


def make_report(tokens: int, link: str = "True", utilisation: int = 10) -> Report:
    figures = {
        "thresholdTokens": tokens,
        "bandwidth": "Abundant",
        "offloadedPercent": None,
        "linkUtilisationPercent": utilisation,
    }
    conditions = {
        status.METRICS_FRESH: ConditionState("True", "Fresh", ""),
        status.LINK_HEALTHY: ConditionState(link, "Because", ""),
    }
    return Report(generation=1, figures=figures, conditions=conditions)


async def test_nothing_is_written_before_there_is_something_to_say(world):
    await world.run(20)
    assert world.api.writes == []
    assert world.api.lease["spec"]["holderIdentity"] == "pod-a"


async def test_a_steady_state_is_written_every_ten_seconds(world):
    world.report = make_report(1000)
    await world.run(30.5)
    assert len(world.api.writes) == 4  # at 0, 10, 20 and 30


async def test_new_figures_wait_and_a_turn_does_not(world):
    world.report = make_report(1000)
    await world.run(3)
    world.report = make_report(1000, utilisation=90)
    await world.run(3)
    assert len(world.api.writes) == 1
    world.report = make_report(1000, link="False", utilisation=90)
    await world.run(0.5)
    assert len(world.api.writes) == 2


async def test_a_threshold_that_moves_all_the_time_is_written_every_two_seconds(world):
    for tokens in range(1000, 1020):
        world.report = make_report(tokens)
        await world.run(0.5)
    assert [write["thresholdTokens"] for write in world.api.writes] == [1000, 1004, 1008, 1012, 1016]


async def test_transition_times_survive_from_the_writer_before(world):
    world.report = make_report(1000)
    await world.run(0.5)
    times = {one["type"]: one["lastTransitionTime"] for one in world.api.writes[0]["conditions"]}
    assert times["LinkHealthy"] == EARLIER
    assert times["MetricsFresh"] > EARLIER


async def test_another_holder_keeps_us_silent_until_it_has_been_for_its_whole_duration(world):
    held = {"holderIdentity": "pod-b", "leaseDurationSeconds": 15, "renewTime": "a", "leaseTransitions": 0}
    world.api.lease = {"metadata": {"name": "kimi-scheduler"}, "spec": held}
    world.report = make_report(1000)
    await world.run(14)
    assert world.api.writes == []
    await world.run(8)
    assert len(world.api.writes) == 1
    assert world.api.lease["spec"]["leaseTransitions"] == 1


@pytest.mark.parametrize("code", [403, 404, 500])
async def test_an_api_server_in_trouble_is_called_sparingly_and_written_to_when_it_is_back(world, code, caplog):
    world.report = make_report(1000)
    await world.run(2)
    world.api.failing = code
    world.report = make_report(2000)
    await world.run(20)
    assert sum("etcd is away" in record.message for record in caplog.records) == 1, "logged once"
    world.api.failing = 0
    await world.run(5)
    assert world.api.writes[-1]["thresholdTokens"] == 2000


async def test_survives_an_absent_server(tmp_path):
    async with KubeSession("http://127.0.0.1:9") as session:
        publisher = Publisher(session, policy_ref("prfaas", "kimi"), "pod-a", lambda: make_report(1), Clock(50.0))
        await publisher.once()
