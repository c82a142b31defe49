"""The life of a worker's two processes: what keeps one from starting is explained, and neither outlives the other."""

import asyncio
import os
import signal
from pathlib import Path

import pytest

from ...waiting import eventually_async

pytestmark = pytest.mark.system


def ended(pid: int) -> bool:
    """The process has ended, or only waits for its new parent to take note."""
    stat = Path(f"/proc/{pid}/stat")
    return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z"


async def until_ended(pid: int) -> None:
    await eventually_async(lambda: ended(pid), "the engine ends")


async def until_loading(engine: int) -> None:
    """Wait until the engine loads torch, which takes it seconds."""
    maps = Path(f"/proc/{engine}/maps")
    await eventually_async(lambda: "libtorch" in maps.read_text(), "the engine loads torch", poll=0.01)


async def test_an_engine_never_outlives_its_front(launch):
    worker = await launch("orphaned").ready()
    engine = worker.engine_pid
    worker.process.kill()
    await until_ended(engine)


async def test_an_engine_that_loads_does_not_outlive_its_front_either(launch):
    worker = launch("unborn")
    await worker.begun()
    engine = worker.engine_pid
    await until_loading(engine)
    # Stopped it cannot see its socket: what ends it is the kernel's doing, and does not wait for the load.
    os.kill(engine, signal.SIGSTOP)
    worker.process.kill()
    await until_ended(engine)


async def test_what_the_end_of_the_drain_cuts_off_gets_an_error(client, launch):
    worker = await launch("cut", "--drain-seconds", "1").ready()
    endless = {"max_tokens": 100_000, "ignore_eos": True}
    async with client.open(worker, stream=True, n=2, **endless) as answer:
        events = client.events(answer)
        await anext(events)
        whole = asyncio.create_task(client.complete(worker, **endless))
        await client.eventually(worker, prfaas_requests_running=2)
        worker.process.send_signal(signal.SIGTERM)
        last = [event async for event in events][-1]
    for error in (last["error"], (await (await whole).json())["error"]):
        assert (error["type"], error["code"]) == ("server_error", "overloaded")
        assert "shut down" in error["message"]
    assert (await whole).status == 503
    assert await worker.exit_code() == 0


async def test_a_source_without_a_model_is_explained_and_ends_with_1(launch, tmp_path):
    worker = launch("empty", "--model-source", str(tmp_path))
    assert await worker.exit_code() == 1
    assert f"no config.json in {tmp_path}" in worker.log.read_text()
    assert "Traceback" not in worker.log.read_text()


async def test_a_taken_port_is_explained_and_ends_with_1(launch, pair):
    worker = launch("second", "--host", pair[0].host)
    assert await worker.exit_code() == 1
    assert "8000 cannot be opened: " in worker.log.read_text()
    assert "Traceback" not in worker.log.read_text()


@pytest.mark.parametrize("seconds", [0, 1])
async def test_ctrl_c_while_the_engine_loads_ends_both_without_a_traceback(launch, seconds: float):
    worker = launch("interrupted")
    await worker.begun()
    await asyncio.sleep(seconds)
    engine = worker.engine_pid
    worker.interrupt()
    assert await worker.exit_code() == 0
    assert ended(engine)
    assert "Traceback" not in worker.log.read_text()


async def test_sigterm_lets_running_requests_finish_and_takes_no_new_ones(client, pair, launch):
    worker = await launch("drained").ready()
    async with client.open(worker, max_tokens=300, stream=True, n=8, temperature=2) as answer:
        events = client.events(answer)
        await anext(events)
        worker.process.send_signal(signal.SIGTERM)
        await client.until_status(worker, "/readyz", 503)
        assert await client.status(worker, "/healthz") == 200
        refused = await client.complete(worker)
        assert (refused.status, (await refused.json())["error"]["code"]) == (503, "overloaded")
        last = [event async for event in events][-2:]
    assert last[1] == "[DONE]"
    assert last[0]["choices"][0]["finish_reason"] in ("length", "stop")
    assert await worker.exit_code() == 0
