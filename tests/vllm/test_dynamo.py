"""A real Dynamo behind our gateway: its frontends are instances, which divide requests among their own workers."""

import json
import threading
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest

from prfaas.names import HUB
from prfaas.wire import headers
from prfaas.wire.routes import Instance
from prfaas_sandbox.progress import progress
from prfaas_worker.assets import model_directory

from .conftest import MODEL
from .dynamo import Frontend, ensure_dynamo, frontends
from .gateways import gateway, table_of

pytestmark = pytest.mark.release


class Dynamo(NamedTuple):
    """Frontends, and the gateway before them."""

    frontends: list[Frontend]
    model: str
    url: str
    admin_url: str

    def post(self, path: str, **body: Any) -> Any:
        data = json.dumps({"model": self.model} | body).encode()
        request = urllib.request.Request(self.url + path, data, {"content-type": "application/json"})
        return urllib.request.urlopen(request, timeout=120)


@pytest.fixture
def dynamo(tmp_path: Path) -> Iterator[Dynamo]:
    with progress() as report:
        python = ensure_dynamo(report)
    model = model_directory(MODEL)
    with frontends(python, model, tmp_path, 2) as started:
        instances = tuple(
            Instance(name=f"frontend-{number}", pool="decode", cluster=HUB, role="decode", url=one.url, engine="dynamo")
            for number, one in enumerate(started)
        )
        table = table_of("dynamo", started[0].url, started[1].url)
        table = msgspec.structs.replace(table, model=str(model), instances=instances)
        with gateway(tmp_path, table) as (url, admin_url):
            yield Dynamo(started, str(model), url, admin_url)


def test_requests_pass_through_and_a_dead_frontend_costs_none(dynamo: Dynamo):
    message = {"role": "user", "content": "What is it?"}
    with dynamo.post("/v1/completions", prompt="hello there", max_tokens=5) as answer:
        assert (answer.headers[headers.DECISION], answer.headers[headers.OUTCOME]) == ("local", "ok")
        assert json.load(answer)["usage"]["completion_tokens"] == 5
    with dynamo.post("/v1/chat/completions", messages=[message], max_tokens=7) as answer:
        assert json.load(answer)["usage"]["completion_tokens"] == 7
    options = {"stream": True, "stream_options": {"include_usage": True}}
    with dynamo.post("/v1/chat/completions", messages=[message], max_tokens=9, **options) as answer:
        *_, usage, done = [line for line in answer.read().split(b"\n\n") if line]
    assert json.loads(usage.removeprefix(b"data: "))["usage"]["completion_tokens"] == 9
    assert done == b"data: [DONE]"

    begun = threading.Semaphore(0)

    def ask(number: int) -> int:
        begun.release()
        with dynamo.post("/v1/completions", prompt=f"number {number}", max_tokens=40) as answer:
            return json.load(answer)["usage"]["completion_tokens"]

    with ThreadPoolExecutor(8) as pool:
        asking = [pool.submit(ask, number) for number in range(32)]
        for _ in range(12):
            begun.acquire()
        dynamo.frontends[0].kill()
        assert [one.result() for one in asking] == [40] * 32
    with urllib.request.urlopen(f"{dynamo.admin_url}/metrics", timeout=10) as metrics:
        assert b'outcome="failed"' not in metrics.read()
