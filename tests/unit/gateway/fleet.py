"""Decode instances of other engines, which publish their cache events, and a gateway before them."""

import hashlib
import json
from typing import Any

from tests.tables import make_instance

from prfaas import names
from prfaas.wire import headers
from prfaas.wire.routes import EngineName

from .caches import until_metric
from .conftest import Answered, Reply, Worker, World, answer
from .publisher import Publisher, next_host


class Fleet:
    """Instances by name, of so many data-parallel ranks each; a publisher is named `d0`, of a further rank `d0/1`."""

    def __init__(self, world: World, **ranks: int):
        self.world = world
        self.ranks = ranks or {"d0": 1, "d1": 1}
        self.publishers: dict[str, Publisher] = {}

    async def start(self, engine: EngineName = "vllm-nixl", *, reply: Reply = answer, **publisher: Any) -> None:
        instances = []
        for name, ranks in self.ranks.items():
            worker = self.world.workers[name] = Worker(name, next_host(), reply=reply)
            await worker.start()
            self.world.stack.push_async_callback(worker.stop)
            instances.append(make_instance(name, url=worker.url, ranks=ranks, engine=engine))
            for rank in range(ranks):
                ports = names.KV_EVENTS_PORT + rank, names.KV_EVENTS_PORT + ranks + rank
                key = f"{name}/{rank}" if rank else name
                self.publishers[key] = Publisher(worker.host, ports=ports, **publisher)
        # Alone, as the events of most tests have no salt.
        await self.world.start(instances=tuple(instances), tokens=100_000, clusters=())

    async def until(self, metric: str, value: float) -> None:
        await until_metric(self.world, metric, value)

    async def post(self, body: dict[str, Any], number: int = 0, path: str = "/v1/completions") -> Answered:
        """Send a request; among equal instances its number decides."""
        request_id = hashlib.sha256(bytes([number])).hexdigest()
        got = await self.world.post(json.dumps(body).encode(), path, headers={headers.REQUEST_ID: request_id})
        assert got.status == 200, got.body
        return got

    async def ask(self, prompt: list[int] | str, number: int = 0) -> str:
        """Return who served this prompt."""
        return (await self.post({"model": "m", "prompt": prompt}, number)).headers[headers.DECODE_INSTANCE]
