"""Proves that a simulated gateway tells `decide` what a live one tells: where a prompt's prefix is by instance, what is
still to be prefilled where, and profiles; so that both place the same requests on the same instances.
"""

import random
from contextlib import ExitStack

import pytest

from prfaas.routing.decide import decide
from prfaas.routing.facts import Route, RoutingFacts
from prfaas.simulate.gateway import EJECT_SECONDS
from prfaas.simulate.outcome import Tally
from prfaas.simulate.request import Arrival, Request
from prfaas.simulate.request_process import RequestProcess
from prfaas.simulate.run import Faults
from prfaas.simulate.scenario import Failure, LinkShape, Scenario
from prfaas.wire.control import ThresholdUpdate
from prfaas.wire.preferences import NO_PREFERENCES
from prfaas_gateway.api import API_ROUTES
from prfaas_gateway.limits import Limits
from prfaas_gateway.request import GatewayRequest, PromptFacts
from prfaas_gateway.state import GatewayState

from .worlds import linear, threshold, world

CACHES = {"hub": 1e12, "member": 1e12}
STEP = world().system.hub[0].step_seconds
"""From the end of a prefill to the first token at an idle decode instance."""


class Live:
    """The live gateway's state over the same table, and what a KV manager would have found."""

    def __init__(self, process: RequestProcess):
        self.process = process
        self.state = GatewayState(Limits(eject_seconds=EJECT_SECONDS), clock=lambda: process.events.now)
        self.state.set_table(process.table)

    def facts(self, request: Request) -> RoutingFacts:
        profiles = {one.name: self.process.scenario.profiles[one.pool] for one in self.process.table.instances}
        received = GatewayRequest(
            api=API_ROUTES["/v1/completions"],
            request_id=str(request.index),
            model="",
            body=b"",
            fields={},
            headers={},
            places=self.state.places(NO_PREFERENCES),
        )
        cached_on = self.process.caches.found(request)
        prompt = PromptFacts(request.total_tokens, cached_on=cached_on, profiles=profiles)
        return self.state.facts(received, prompt, request.tried)


def conversations(seed: int, count: int = 200) -> list[Request]:
    rng = random.Random(seed)
    made = []
    for index in range(count):
        which, tokens = rng.randrange(8), rng.randrange(200, 40_000)
        made.append(Request(index, Arrival(0.0, tokens, 100, [which * 1000 + i for i in range(-(-tokens // 512))])))
    return made


@pytest.mark.parametrize("mode", ["Fixed", "Priced"])
def test_both_place_every_request_alike_while_caches_and_queues_fill(mode):
    process = RequestProcess(world(threshold(8_000, mode), cache_bytes=CACHES).validated(), Tally())
    live, sim, rng = Live(process), process.gateway, random.Random(7)
    under_way: list[tuple[Request, Route, ExitStack]] = []
    with ExitStack() as at_end:
        for request in conversations(3):
            route, of_live = sim.decide(request), decide(live.facts(request))
            assert route == of_live
            assert isinstance(route, Route)
            sim.enter(route, request)
            leg = at_end.enter_context(ExitStack())
            load = leg.enter_context(live.state.occupied(route))
            under_way.append((request, route, leg))
            if rng.random() < 0.7:
                done, its_route, its_leg = under_way.pop(rng.randrange(len(under_way)))
                for one in {its_route.decode.name, (its_route.prefill or its_route.decode).name}:
                    process.caches.insert(one, done)
                sim.prefilled(its_route, done)
                sim.leave(its_route.decode.name, done)
                its_leg.close()
            elif rng.random() < 0.5:
                sim.prefilled(route, request)
                load.prefill_done(streams=True)


def lone(decoding: int = 0, prefilling: int = 0, **more) -> Scenario:
    """A hub without members in use."""
    return world(threshold(1 << 20), offload=0, hub=(prefilling, decoding), **more)


def turn(number: int, blocks: int, conversation: int = 0) -> Request:
    """A prompt of so many full blocks of a conversation, each turn of which begins with the one before."""
    names = [conversation * 1000 + i for i in range(blocks)]
    return Request(number, Arrival(0.0, 512 * blocks, 1, names))


def test_a_prefill_takes_from_its_decode_instance_what_that_pays_for_and_computes_the_rest():
    cheap = linear(1e-3, token_bytes=10)  # 10 s to compute, no time to fetch
    costly = linear(1e-3, token_bytes=1_000_000)  # 82 s to fetch
    for profile, seconds in ((cheap, 0.512 + STEP), (costly, 10.752 + STEP)):
        scenario = lone(decoding=1, prefilling=1, profiles=(profile, profile), cache_bytes={"hub": 1e12})
        process = RequestProcess(scenario.validated(), Tally())
        process.caches.insert("home-decode-0", turn(9, 20))
        process.start(turn(0, 21).arrival)
        while process.tally.ended < 1 and process.events.step():
            pass
        assert process.tally.result(0.0).ttft_seconds.mean == pytest.approx(seconds, abs=0.01)


def test_does_without_a_prefix_whose_link_stops():
    """A hub's instance takes a prefix from the member cluster, abundant as bandwidth is, until the link falls."""
    profile = linear(1e-3, token_bytes=6_000)  # 10,240 tokens take 4.9 s to cross, and 10.2 s to compute
    for falls_at_seconds, seconds in ((1000.0, 4.915 + 0.512 + STEP), (2.0, 2.0 + 1.0 + 10.752 + STEP)):
        conditions = {"member": LinkShape(schedule=((falls_at_seconds, 0.0),))}
        scenario = world(
            threshold(1 << 20),
            hub=(1, 1),
            link_mbps=100,
            profiles=(profile, profile),
            cache_bytes=CACHES,
            conditions=conditions,
        )
        process = RequestProcess(scenario.validated(), Tally())
        Faults(process)
        for name in ("far-0", "far-1"):
            process.caches.insert(name, turn(9, 20))
        update = ThresholdUpdate(
            tokens=1 << 20, bandwidth="Abundant", offload_clusters=("member",), expires_seconds=10, reason=""
        )
        process.gateway.update(update)
        process.start(turn(0, 21).arrival)
        while process.tally.ended < 1 and process.events.step():
            pass
        assert process.tally.result(0.0).ttft_seconds.mean == pytest.approx(seconds, abs=0.01)


def test_an_instance_that_dies_forgets_and_the_others_of_its_cluster_do_not():
    failure = Failure(at_seconds=1.0, for_seconds=1.0, name="far-0")
    process = RequestProcess(world(cache_bytes=CACHES, failures=(failure,)).validated(), Tally())
    Faults(process)
    for name in ("far-0", "far-1"):
        process.caches.insert(name, turn(0, 20))
    assert process.caches.found(turn(1, 21)) == {"far-0": 10_240, "far-1": 10_240}
    while process.events.step():
        pass
    assert process.caches.found(turn(1, 21)) == {"far-1": 10_240}


def test_memory_of_a_cluster_is_shared_by_its_instances():
    profile = linear(1e-3, token_bytes=1000)
    prompt_bytes = 10 * 512 * 1000

    def kept(size_bytes: float) -> int:
        scenario = lone(decoding=2, profiles=(profile, profile), cache_bytes={"hub": size_bytes})
        caches = RequestProcess(scenario.validated(), Tally()).caches
        for conversation in range(8):
            caches.insert("home-decode-0", turn(0, 10, conversation))
        return sum(bool(caches.match("home-decode-0", turn(1, 11, conversation))) for conversation in range(8))

    assert (kept(16 * prompt_bytes), kept(8 * prompt_bytes)) == (8, 4)
