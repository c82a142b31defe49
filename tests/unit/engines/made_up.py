"""An engine that nobody makes, added in four places, as docs/extend/another-engine.md says.

Run as a program, this renders a pool of it, serves a request by it, and prints as JSON what came of the record. It is a
process of its own (test_another_engine.py), because what is made of the records is made when a module is imported.
"""

import asyncio
import importlib.util
import json
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from aiohttp import ClientSession, web

from prfaas import engines
from prfaas.engines import EngineRecord, PortRange

ROOT = Path(__file__).parents[3]
NAME = "made-up"
COMPLETIONS = frozenset({"/v1/completions"})
POLICY = {"metadata": {"name": "p", "uid": "2"}, "spec": {"model": "m", "decodePool": "d"}}
RECORD = EngineRecord(
    name=NAME,
    type=NAME,
    title="MadeUp",
    experimental="was not run against made-up yet",
    flags=("made-up-port",),
    roles="Fixed",
    ports=(PortRange(7000, 7003, "notes", is_called=True, has_metrics=True),),
    chosen_ports="caches at ports that it makes up",
    apis=COMPLETIONS,
    hand_offs=COMPLETIONS,
    calls="prefill first; then decode with a note",
    events="Zmq",
    metrics=NAME,
    metrics_path="/figures",
    checked="Request",
    steering_fields=frozenset({"made_up_note"}),
)
# The first place, before anything is made of the records.
cast(dict[str, EngineRecord], engines.ENGINES)[NAME] = RECORD

from tests.serving import serving as serving_instance  # noqa: E402
from tests.tables import make_instance, make_table  # noqa: E402

from prfaas.api import DecodePool, PrefillPool, PrfaaSPolicy, crd  # noqa: E402
from prfaas.wire.routes import Cluster, RoutingTable, decode, encode  # noqa: E402
from prfaas_gateway.engines import PROTOCOLS  # noqa: E402
from prfaas_gateway.engines.shared import Attempt, EngineProtocol, Leg, call, for_prefill, with_fields  # noqa: E402
from prfaas_gateway.options import GatewayOptions  # noqa: E402
from prfaas_gateway.request import GatewayRequest  # noqa: E402
from prfaas_gateway.server import serving  # noqa: E402
from prfaas_gateway.upstream import Answer, Upstream  # noqa: E402
from prfaas_operator.plan import transfers  # noqa: E402
from prfaas_operator.plan.pool_status import PoolObject, engine_proof  # noqa: E402
from prfaas_operator.render import pool_deployment  # noqa: E402
from prfaas_operator.render.engines import STARTS  # noqa: E402
from prfaas_operator.render.launch import Start, StartTerms, event_ports  # noqa: E402
from prfaas_operator.render.protection import network_policy  # noqa: E402
from prfaas_scheduler.engines import QUERIES, EngineQueries  # noqa: E402
from prfaas_scheduler.queries import short_query  # noqa: E402


class MadeUpEngine:
    def __init__(self, upstream: Upstream):
        self._upstream = upstream

    async def open(self, request: GatewayRequest, attempt: Attempt) -> Answer:
        body, route = request.body, attempt.route
        if route.prefill is not None:
            filled = for_prefill(request.every_field, {"made_up_note": "keep"})
            kept = await call(self._upstream, request, attempt, Leg("prefill", route.prefill, filled))
            kept.close()
            body = with_fields(request.every_field, {"made_up_note": json.loads(kept.body or b"")["note"]})
        return await call(self._upstream, request, attempt, Leg("decode", route.decode, body))


def start(pool: PoolObject, _: StartTerms) -> Start:
    notes = {"notes": 7000}
    return Start(
        ["made-up", "serve"], ["--made-up-port", "8000", *pool.spec.engine.args], {}, event_ports(pool) | notes
    )


# The other three places.
cast(dict[str, type[EngineProtocol]], PROTOCOLS)[NAME] = MadeUpEngine
cast(dict[str, Any], STARTS)[NAME] = start
cast(dict[str, EngineQueries], QUERIES)[NAME] = EngineQueries(
    short={"instances_sampled_at_seconds": "max by (cluster) (timestamp(made_up_running{$at}))"}, long={}
)


def render() -> dict[str, Any]:
    """Return a pool's Deployment and conditions."""
    spec = {"model": {"name": "m", "source": "/models/m"}, "engine": {"type": NAME, "image": "made-up:1"}}
    pool = PrefillPool.model_validate({"metadata": {"name": "p", "uid": "1"}, "spec": spec})
    return {"deployment": pool_deployment.deployment(pool, None), "proof": next(iter(engine_proof(pool).values()))}


def table_of(prefill_url: str, decode_url: str) -> RoutingTable:
    urls = {"x0": prefill_url, "d0": decode_url}
    instances = tuple(make_instance(name, url=url, engine=NAME) for name, url in urls.items())
    cluster = Cluster(name="eu", capacity_mbps=100, utilisation_query="vector(0)")
    return make_table(*instances, clusters=(cluster,))


async def serve() -> dict[str, Any]:
    """Return what instances and a client got of a long request, and of one that would steer the engine."""
    seen: dict[str, Any] = {}

    async def prefill(request: web.Request) -> web.Response:
        seen["prefill"] = await request.json()
        return web.json_response({"note": "here"})

    async def answer(request: web.Request) -> web.Response:
        seen["decode"] = await request.json()
        return web.json_response({"text": "served"})

    async with serving_instance(prefill) as prefill_url, serving_instance(answer) as decode_url:
        with tempfile.TemporaryDirectory() as folder:
            routes = Path(folder) / "routes.json"
            routes.write_bytes(encode(table_of(prefill_url, decode_url)))
            options = GatewayOptions("127.0.0.1", 0, 0, routes_file=routes, drain_seconds=1)
            async with serving(options) as gateway, ClientSession(f"http://127.0.0.1:{gateway.port}") as client:
                body = {"model": "m", "prompt": "x" * 40_000}
                async with client.post("/v1/completions", json=body) as response:
                    seen["client"] = await response.json()
                async with client.post("/v1/completions", json=body | {"made_up_note": "mine"}) as response:
                    seen["steered"] = response.status
                async with client.post("/v1/chat/completions", json={"model": "m", "messages": []}) as response:
                    seen["not served"] = response.status
    return seen


def script(path: str) -> ModuleType:
    """Return a script of the repository as a module."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    if spec is None or spec.loader is None:
        raise FileNotFoundError(path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main() -> None:
    table = table_of("http://x", "http://d")
    found = {
        "render": render(),
        "requests": asyncio.run(serve()),
        "table": decode(encode(table)) == table,
        "conditions": {name: state.reason for name, state in transfers.conditions(table).items()},
        "policy": network_policy(PrfaaSPolicy.model_validate(POLICY), table.instances),
        "query": short_query(table, 5),
        "crds": [crd.to_yaml(crd.crd(kind)) for kind in (PrefillPool, DecodePool)],
        "chart": script("charts/describe.py").engines_file(),
        "pages": {path.name: text for path, text in script("docs/reference.py").pages().items()},
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
