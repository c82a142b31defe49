"""A real gateway before two real workers: a prompt goes where its beginning is cached, and the worker says that it was;
where that one is busy it goes to the other, which takes the beginning over.
"""

import json
import random
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from prfaas.names import HUB
from prfaas.routing.affinity import PrefixFacts, pays
from prfaas.routing.facts import CLUSTER_MBPS
from prfaas.routing.prompt_size import prompt_values
from prfaas.wire import headers
from prfaas.wire.routes import Instance, LinkWatermarks, RoutingTable, Threshold, encode
from prfaas_gateway.api import API_ROUTES
from prfaas_gateway.kv.manager import KvManager
from prfaas_gateway.options import GatewayOptions
from prfaas_gateway.request import GatewayRequest, PromptFacts, read_fields
from prfaas_gateway.server import serving

from ...waiting import eventually_async
from .conftest import Client, Worker
from .prompts import text_of

pytestmark = pytest.mark.system

BUSY = 6
"""Streams that are dearer together than a prompt of 1700 tokens."""
SURELY_CACHED = 3000 - 3 * 64
"""Tokens of a beginning of 3000 bytes, each a token, but for the last blocks."""


def table(urls: dict[str, str]) -> RoutingTable:
    instances = [Instance(name=name, pool="d", cluster=HUB, role="decode", url=url) for name, url in urls.items()]
    return RoutingTable(
        policy="p",
        namespace="n",
        generation=1,
        model="tiny",
        on_offload_failure="PrefillLocally",
        threshold=Threshold(mode="Fixed", tokens=100_000, min_tokens=1, max_tokens=100_000),
        watermarks=LinkWatermarks(high_percent=80, low_percent=50),
        short_interval_seconds=1,
        instances=tuple(instances),
    )


class Gateway:
    def __init__(self, session: aiohttp.ClientSession, port: int, admin_port: int, routes: Path):
        self.session = session
        self.url, self.admin_url = (f"http://127.0.0.1:{one}" for one in (port, admin_port))
        self._routes = routes

    def route(self, urls: dict[str, str]) -> None:
        """Send to these instances from now on."""
        self._routes.write_bytes(encode(table(urls)))

    def open(self, prompt: str, number: int, **fields):
        """Begin a request, whose answer is the caller's to read."""
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 2, "temperature": 0} | fields
        extra = {headers.REQUEST_ID: random.Random(number).randbytes(16).hex()}
        return self.session.post(f"{self.url}/v1/completions", json=body, headers=extra)

    async def ask(self, prompt: str, number: int, **fields) -> tuple[str, int]:
        """Return which instance decoded, and the tokens that it reports as cached."""
        async with self.open(prompt, number, **fields) as answer:
            assert answer.status == 200, await answer.text()
            return answer.headers[headers.DECODE_INSTANCE], int(answer.headers[headers.CACHED_TOKENS])

    async def until(self, metric: str, is_enough: Callable[[float], bool]) -> float:
        value = 0.0

        async def is_so() -> bool:
            nonlocal value
            async with self.session.get(f"{self.admin_url}/metrics") as answer:
                lines = (await answer.text()).splitlines()
            value = next((float(line.split()[-1]) for line in lines if line.startswith(f"{metric} ")), 0.0)
            return is_enough(value)

        await eventually_async(is_so, lambda: f"{metric}, last {value}")
        return value


@pytest.fixture
def gateway(tmp_path: Path):
    @asynccontextmanager
    async def opened(urls: dict[str, str]) -> AsyncIterator[Gateway]:
        routes = tmp_path / "routes.json.gz"
        routes.write_bytes(encode(table(urls)))
        async with (
            serving(GatewayOptions("127.0.0.1", 0, 0, routes_file=routes, drain_seconds=2)) as running,
            aiohttp.ClientSession() as session,
        ):
            yield Gateway(session, running.port, running.admin_port, routes)

    return opened


@pytest.fixture
def managers(monkeypatch) -> list[KvManager]:
    """What follows the caches, of every gateway that the test starts."""
    made: list[KvManager] = []

    class Shown(KvManager):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            made.append(self)

    monkeypatch.setattr("prfaas_gateway.server.KvManager", Shown)
    return made


async def known(manager: KvManager, prompt: str) -> PromptFacts:
    """What the gateway knows of a prompt, each of whose bytes is a token."""
    body = json.dumps({"model": "tiny", "prompt": prompt}).encode()
    model, fields = read_fields(body, every=False)
    api = API_ROUTES["/v1/completions"]
    request = GatewayRequest(api=api, request_id="", model=model, body=body, fields={}, headers={})
    return await manager.find(request, prompt_values(fields, api.fields), PromptFacts(len(prompt)))


async def until_known(managers: list[KvManager], prompt: str, true: Callable[[PromptFacts], bool]) -> None:
    """Wait until what the first gateway knows of a prompt is enough."""

    async def is_known() -> bool:
        return true(await known(managers[0], prompt))

    await eventually_async(is_known, "the gateway knows of the prompt")


async def until_fetching_pays(managers: list[KvManager], client: Client, worker: Worker, prompt: str) -> None:
    """Measure prefills at d1 until the gateway would fetch the prompt's beginning from d0. The first samples of a busy
    machine can make a curve that does not rise: then computing costs nothing, and nothing is fetched."""

    async def is_so() -> bool:
        found = await known(managers[0], prompt)
        if (profile := found.profiles.get("d1")) is not None and pays(
            PrefixFacts(
                prompt_tokens=len(prompt),
                cached_tokens=0,
                source_tokens=found.cached_on["d0"],
                profile=profile,
                link_mbps=CLUSTER_MBPS,
                round_trip_seconds=0.0,
            )
        ):
            return True
        await client.complete(worker, prompt=text_of(1500, f"measured {random.random()}"), max_tokens=1)
        return False

    await eventually_async(is_so, "fetching pays")


async def test_a_prompt_goes_to_the_instance_that_has_its_beginning(gateway, managers, pair):
    async with gateway({f"d{n}": worker.url for n, worker in enumerate(pair)}) as door:
        await door.until('prfaas_gateway_kv_instances{state="followed"}', lambda count: count == 2)
        beginning = text_of(3000, "with")
        first, cached = await door.ask(beginning, 0)
        assert cached == 0
        prompts = [beginning + text_of(200, f"with {number}") for number in range(1, 7)]
        await until_known(managers, prompts[0], lambda found: found.cached_on.get(first, 0) >= SURELY_CACHED)
        others = [await door.ask(prompt, number) for number, prompt in enumerate(prompts, 1)]
        assert [name for name, _ in others] == [first] * 6
        assert all(cached >= SURELY_CACHED for _, cached in others), others
        assert await door.until("prfaas_gateway_kv_matched_tokens_total", lambda _: True) >= 6 * (SURELY_CACHED)


async def test_a_prompt_that_goes_elsewhere_fetches_its_beginning(gateway, managers, pair, client):
    first, second = pair
    beginning, fields = text_of(1500, "elsewhere"), {"max_tokens": 12, "logprobs": 5}
    prompt, surely = beginning + text_of(200, "its ending"), 1500 - 3 * 64
    await client.complete(second, prompt=text_of(1500, "to measure"))
    wanted = await client.complete(second, prompt=prompt, cache_salt="computed", **fields)
    async with gateway({"d0": first.url}) as door, AsyncExitStack() as busy:
        assert await door.ask(beginning, 0) == ("d0", 0)
        for number in range(BUSY):
            stream = door.open(text_of(20, f"{number}"), number, max_tokens=20_000, ignore_eos=True, stream=True)
            assert (await busy.enter_async_context(stream)).status == 200
        door.route({"d0": first.url, "d1": second.url})
        await until_known(managers, prompt, lambda found: found.cached_on.get("d0", 0) >= surely)
        await until_fetching_pays(managers, client, second, prompt)
        before = await client.metrics(second)
        async with door.open(prompt, 100, **fields) as answer:
            head, found = answer.headers, await answer.json()
        after = await client.metrics(second)
        assert head[headers.DECODE_INSTANCE] == "d1"
        assert await door.until("prfaas_gateway_kv_prefixes_total", lambda _: True) == 1
        outcomes = {name: value for name, value in after.items() if name.startswith("prfaas_prefix_fetches_total")}
        assert int(head[headers.CACHED_TOKENS]) >= surely, outcomes
    name = 'prfaas_prefix_fetches_total{outcome="fetched"}'
    assert after[name] - before.get(name, 0) == 1
    assert after["prfaas_prompt_tokens_total"] - before["prfaas_prompt_tokens_total"] <= len(prompt) + 1 - surely
    mine, theirs = found["choices"][0], (await wanted.json())["choices"][0]
    assert mine["text"] == theirs["text"], "what was taken over is what would have been computed"
    assert mine["logprobs"]["token_logprobs"] == pytest.approx(theirs["logprobs"]["token_logprobs"], abs=1e-4)
