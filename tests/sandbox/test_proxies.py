"""A proxy in the environment, as companies set it, is not used for what runs on this machine."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from prfaas_sandbox.demo.client import DemoClient
from prfaas_sandbox.demo.steps import ThresholdSampler
from prfaas_sandbox.kind import environment

ANSWER = b'{"status": "success", "data": {"result": [{"value": [0, "7"]}]}}'


@pytest.fixture(autouse=True)
def proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
async def url() -> AsyncIterator[str]:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(ANSWER)}\r\n"
        writer.write(f"{head}Connection: close\r\n\r\n".encode() + ANSWER)
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def test_the_demos_requests_go_straight_to_the_gateway(url):
    client = DemoClient(url, "tiny")
    record = await client.ask("hello", act="lengths")
    await client.close()
    assert "Connection error" not in record.outcome
    assert record.outcome == "failed: the stream ended early"  # what this answer, which is no stream, is


async def test_the_demos_queries_go_straight_to_prometheus(url):
    sampler = ThresholdSampler(url, lambda _: None)
    assert await sampler.query("up") == 7.0
    await sampler._http.aclose()


async def test_a_services_first_answer_in_kind_is_waited_for_without_a_proxy(url, monkeypatch):
    monkeypatch.setattr(environment, "OUTSIDE_SECONDS", 2.0)
    await environment._answered(url)
