"""A hostile member gives a false cache, to have it serve clients who forbid the member, and those after its revocation.

The decode instance is a stand-in with vLLM's prefix cache: it finds blocks by their tokens and their salt, and does not
know whose bytes they are.
"""

import json
from typing import Any, Final

import pytest
from aiohttp import web
from msgspec.structs import replace
from tests.tables import make_instance, make_table
from tests.unit.gateway.conftest import World

from prfaas.names import HUB
from prfaas.wire import headers
from prfaas.wire.headers import UNKNOWN_PLACE
from prfaas.wire.routes import Cluster
from prfaas_gateway.api import API_ROUTES
from prfaas_gateway.limits import Limits
from prfaas_gateway.request import GatewayRequest, PromptFacts, place_salt
from prfaas_gateway.state import GatewayState

PROMPT: Final = "Is this contract fair? " * 400
EU: Final = Cluster(name="eu", place="eu@1", datacenter="eu-west", capacity_mbps=100, utilisation_query="vector(0)")
US: Final = replace(EU, name="us", place="us@1", datacenter="us-east")
FORBIDDEN: Final = [{headers.DATACENTERS: "forbid eu"}, {headers.OFFLOAD: "never"}]


class Pair:
    """A decode instance of the hub and the member's prefill instance, which gives what `gives` says for each prompt."""

    def __init__(self, world: World):
        self.world = world
        self.gives = "false"
        self._cached: dict[tuple[str | None, str], str] = {}
        world.workers["x0"].reply, world.workers["d0"].reply = self._prefill, self._decode

    async def ask(self, **sent: str) -> str:
        """Return whose bytes an answer is made of."""
        got = await self.world.post({"model": "m", "prompt": PROMPT}, "/v1/completions", headers=sent)
        assert got.status == 200, got.body
        return got.json["made_of"]

    async def _prefill(self, _request: web.Request, _body: bytes) -> web.Response:
        return web.json_response({"kv_transfer_params": {"remote_engine_id": self.gives}})

    async def _decode(self, _request: web.Request, body: bytes) -> web.Response:
        fields: dict[str, Any] = json.loads(body)
        came = fields.get("kv_transfer_params", {}).get("remote_engine_id", HUB)
        return web.json_response({"made_of": self._cached.setdefault((fields.get("cache_salt"), PROMPT), came)})


async def start(world: World, *clusters: Cluster) -> Pair:
    await world.start("d0", "x0", engine="vllm-nixl", clusters=clusters)
    return Pair(world)


@pytest.mark.parametrize("sent", FORBIDDEN, ids=["forbids", "never"])
async def test_what_a_member_gave_serves_no_request_that_may_not_go_there(world, sent):
    pair = await start(world, EU)
    assert [await pair.ask() for _ in range(2)] == ["false"] * 2
    assert await pair.ask(**sent) == HUB
    assert await pair.ask() == "false", "those that allow it share what it gave"


@pytest.mark.parametrize("sent", FORBIDDEN, ids=["forbids", "never"])
async def test_control_without_the_salt_its_bytes_serve_everybody(world, sent):
    pair = await start(world, EU)
    world.state.needs_place_salt = False
    assert await pair.ask() == "false"
    assert await pair.ask(**sent) == "false"


async def test_a_request_that_forbids_one_of_two_members_finds_nothing_of_it(world):
    pair = await start(world, EU, US)
    assert await pair.ask() == "false"
    assert await pair.ask(**{headers.DATACENTERS: "forbid eu-west"}) == HUB
    assert await pair.ask(**{headers.DATACENTERS: "prefer us-east"}) == "false"


async def test_nothing_that_it_gave_before_it_was_cut_off_serves_even_when_it_has_joined_again(world):
    pair = await start(world, EU)
    assert await pair.ask() == "false"
    member = world.table.instances
    without = tuple(one for one in member if one.cluster == HUB)
    world.state.set_table(world.write_table(instances=without, clusters=()))
    assert await pair.ask() == HUB
    pair.gives = "true"
    world.state.set_table(world.write_table(instances=member, clusters=(replace(EU, place="eu@2"),)))
    assert await pair.ask() == "true"
    world.state.set_table(world.write_table(instances=member, clusters=(EU,)))
    assert await pair.ask() == "false", "control: under the name of before it would serve"


@pytest.mark.parametrize(
    ("places", "has_place_salt", "clusters"),
    [
        pytest.param((UNKNOWN_PLACE, "eu@2"), True, {"eu"}, id="control: it was there"),
        pytest.param((UNKNOWN_PLACE,), True, set(), id="it came since"),
        pytest.param((UNKNOWN_PLACE, "eu@1"), True, set(), id="it came again since"),
        pytest.param((UNKNOWN_PLACE, "eu@2"), False, set(), id="vLLM came since"),
    ],
)
def test_a_request_goes_to_no_member_that_is_not_in_its_salt(places, has_place_salt, clusters):
    state = GatewayState(Limits())
    instances = (make_instance(name, engine="vllm-prfaas") for name in ("d0", "x0"))
    state.set_table(make_table(*instances, clusters=(replace(EU, place="eu@2"),)))
    request = GatewayRequest(
        api=API_ROUTES["/v1/completions"],
        request_id="r",
        model="m",
        body=b"",
        fields={},
        headers={},
        places=places,
        has_place_salt=has_place_salt,
    )
    assert state.facts(request, PromptFacts(total_tokens=9000), set()).rule.offload_clusters == clusters


def test_a_salt_is_of_the_members_in_any_order_and_of_the_clients_own():
    assert place_salt(("*", "a", "b"), "s") == place_salt(("b", "a"), "s")
    others = [(("a",), "s"), (("a b",), "s"), (("a", "b"), ""), (("a", "b", "s"), "")]
    assert len({place_salt(("a", "b"), "s"), *(place_salt(*one) for one in others)}) == 5
