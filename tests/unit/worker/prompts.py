"""Prompts for real workers, and what tests read of their answers."""

import random
from typing import Any

import aiohttp

IDLE = dict.fromkeys(
    ["prfaas_requests_running", "prfaas_requests_waiting", "prfaas_prefills_running", "prfaas_prefills_waiting"], 0.0
)


def text_of(length: int, seed: int | str = 0) -> str:
    return "".join(random.Random(seed).choices("abcdefghijklmnopqrstuvwxyz (),.\n", k=length))


async def choices(answer: aiohttp.ClientResponse) -> list[dict[str, Any]]:
    assert answer.status == 200, await answer.text()
    return (await answer.json())["choices"]
