"""`prfaas profile measure` of a real worker: a plan and a pool take what it prints, and it fits the worker."""

import asyncio
import json

import aiohttp
import pytest
import typer
from typer.testing import CliRunner

from prfaas.capacity.profile import prefill_seconds
from prfaas.cli.measured_server import HttpServer
from prfaas.cli.profile_measure import measure
from prfaas.wire.profile import Profile

pytestmark = pytest.mark.quiet

LENGTH = 700
app = typer.Typer()
app.command()(measure)


def measured(url, folder):
    arguments = ["--url", url, "--max-tokens", "1024", "--save", str(folder / "p.json"), "-o", "json"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, (result.output, result.exception)
    return json.loads((folder / "p.json").read_text()), result.stderr


async def test_a_worker_is_measured_in_seconds_and_as_it_says_itself(launch, tmp_path):
    worker = await launch("measured", "--max-running", "4").ready()
    found, said = await asyncio.to_thread(measured, worker.url, tmp_path)
    async with aiohttp.ClientSession() as session, session.get(f"{worker.url}/v1/profile") as answer:
        own = await answer.json()
    profile = Profile(**found["profile"])
    assert (profile.state_bytes, profile.token_bytes) == (own["state_bytes"], own["token_bytes"])
    measured_batches = {step["batch"] for step in found["decode_steps"]}
    # Where no two measurements agree, as on a busy machine, a batch is left out.
    left_out = {n for n in (1, 2, 4) if any(note.startswith(f"decode steps of {n} streams") for note in found["notes"])}
    assert (measured_batches | left_out, measured_batches & left_out) == ({1, 2, 4}, set())
    assert len(measured_batches) > 1
    assert "8 streams did not run at once: decode steps end before" in found["notes"]
    assert "1,024 tokens" in said
    with HttpServer(worker.url) as server:
        server.card()
        prompts = [[(n * seed) % 251 for n in range(LENGTH)] for seed in (3, 5, 7, 11, 13)]
        alone = min(answer.first_seconds for prompt in prompts for answer in server.ask([prompt], 1))
    assert alone / 1.3 < prefill_seconds(profile, LENGTH) < alone * 1.3


async def test_load_generators_find_a_worker_healthy(launch):
    worker = await launch("healthy").ready()
    async with aiohttp.ClientSession() as session, session.get(f"{worker.url}/health") as answer:
        assert answer.status == 200
