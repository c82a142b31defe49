"""Requests are sent at their times and timed from these, whatever answers come."""

import pytest

from prfaas.errors import PeerError
from prfaas.simulate.request import Arrival
from prfaas_sandbox.evaluate import drive
from prfaas_sandbox.evaluate.drive import Driver

from .evaluated import World

STRETCH = 2.0


def quiet(_: str) -> None:
    pass


async def test_answers_come_in_the_order_of_arrival_and_in_the_times_of_the_case():
    async with World.serving() as world, Driver.connected(world.url, "m", STRETCH, 1) as driver:
        # As if it was due three seconds ago: nobody sent it, and its wait counts all the same.
        answers = await driver.run([Arrival(-3.0, 900, 4), Arrival(0.0, 5, 1)], quiet)
    assert [one.prompt_tokens for one in answers] == [901, 6]
    sent = [(one["model"], len(one["prompt"]), one["max_tokens"]) for one in world.prompts]
    assert sent == [("m", 900, 4), ("m", 5, 1)]
    late, prompt = (one.ttft_seconds for one in answers)
    assert late is not None
    assert prompt is not None
    assert late == pytest.approx(3.0, abs=1.0)
    assert answers[0].sent_late_seconds == pytest.approx(3.0, abs=1.0)
    assert answers[1].sent_late_seconds < 1.0
    assert prompt < 1.0
    assert all(one.offloaded and not one.fallback and not one.error for one in answers)
    assert all(one.parts == {"prefill": 2.0} for one in answers)


async def test_prompts_are_the_same_each_time_and_others_with_another_seed():
    sent = []
    for seed in (1, 1, 2):
        async with World.serving() as world, Driver.connected(world.url, "m", STRETCH, seed) as driver:
            await driver.run([Arrival(0.0, 64, 1)], quiet)
        sent.append(world.prompts[0]["prompt"])
    assert sent[0] == sent[1] != sent[2]


async def test_prompts_with_equal_blocks_begin_alike_and_no_further():
    async with World.serving() as world, Driver.connected(world.url, "m", STRETCH, 1) as driver:
        await driver.run(
            [Arrival(0.0, 1025, 1, (7, 8)), Arrival(0.1, 1025, 1, (7, 9)), Arrival(0.2, 600, 1, (7,))], quiet
        )
    first, second, third = (one["prompt"] for one in world.prompts)
    assert [len(one) for one in (first, second, third)] == [1025, 1025, 600]
    assert first[:512] == second[:512] == third[:512]
    assert len({first[512:600], second[512:600], third[512:600]}) == 3
    assert first[:512] != first[512:1024], "another name"


@pytest.mark.parametrize(("status", "loss"), [(429, "refused"), (503, "failure"), (502, "failure"), (504, "timeout")])
async def test_a_lost_request_has_the_reason_and_only_a_full_system_refuses(status: int, loss: str):
    async with World.serving() as world, Driver.connected(world.url, "m", STRETCH, 1) as driver:
        world.refuses, world.refuses_with = "no", status
        (answer,) = await driver.run([Arrival(0.0, 64, 1)], quiet)
    assert (answer.lost, answer.error) == (loss, f"{status}: no")
    assert (answer.prompt_tokens, answer.ttft_seconds) == (64, None)


async def test_an_answer_that_nobody_can_read_is_lost_and_the_others_are_not():
    async with World.serving() as world, Driver.connected(world.url, "m", STRETCH, 1) as driver:
        world.parts = "lunch=1"
        (answer,) = await driver.run([Arrival(0.0, 64, 1)], quiet)
    assert answer.lost == "failure"
    assert "'lunch' is no part" in answer.error


async def test_an_answer_has_as_much_time_as_the_stretch_gives_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(drive, "_LONGEST_SECONDS", 1e-9)
    async with World.serving() as world, Driver.connected(world.url, "m", STRETCH, 1) as driver:
        (answer,) = await driver.run([Arrival(0.0, 64, 1)], quiet)
    assert answer.lost == "timeout"
    async with World.serving() as world, Driver.connected(world.url, "m", 1e12, 1) as driver:
        (answer,) = await driver.run([Arrival(0.0, 64, 1)], quiet)
    assert answer.lost is None


async def test_no_run_begins_with_a_system_that_does_not_answer():
    async with World.serving() as world, Driver.connected(world.url, "m", STRETCH, 1) as driver:
        await driver.warm_up(1000)
        assert max(len(one["prompt"]) for one in world.prompts) == 1000, "no longer than the case's"
        world.refuses = "starting"
        with pytest.raises(PeerError, match="503: starting"):
            await driver.warm_up(1000)
