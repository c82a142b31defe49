"""A client wants the prompts of others prefilled elsewhere, by odd texts that teach the gateway wrong lengths."""

import json
import re
from pathlib import Path
from typing import Final

import pytest
from aiohttp import web
from tests.unit.gateway.conftest import World

from prfaas.wire import headers
from prfaas_gateway import auth

KEYS: Final = {"alice": "sk-alice-0123456789abcdef", "mallory": "sk-mallory-0123456789abcdef"}
WORDS: Final = "the quick brown fox "
VOCABULARY: Final = re.compile(r"the|quick|brown|fox|a{16}|\S")
THRESHOLD_TOKENS: Final = 300
ODD_LETTERS, ODD_PROMPTS, USUAL_PROMPTS = 2000, 20, 3
ELSEWHERE: Final = {"local": "offload", "offload": "local"}
each_poison = pytest.mark.parametrize(
    ("letter", "repeats", "place"),
    [("z", 60, "local"), ("a", 100, "offload")],
    ids=["a letter a token", "many letters a token"],
)


async def count(_request: web.Request, body: bytes) -> web.StreamResponse:
    """Answer like an engine whose vocabulary has some words, and the letter a sixteen times."""
    tokens = VOCABULARY.findall(json.loads(body)["prompt"])
    return web.json_response({}, headers={headers.PROMPT_TOKENS: str(len(tokens))})


async def ask(world: World, client: str, prompt: str) -> str:
    """Return where a prompt is prefilled."""
    shown = {"Authorization": f"Bearer {KEYS[client]}"}
    got = await world.post({"model": "m", "prompt": prompt}, "/v1/completions", headers=shown)
    assert got.status == 200
    return got.headers[headers.DECISION]


async def poisoned(world: World, keys: Path, letter: str, repeats: int) -> tuple[set[str], set[str]]:
    """Return where a client's prompts are prefilled before another one sends odd texts, and after that."""
    keys.mkdir()
    for name, key in KEYS.items():
        (keys / name).write_text(key)
    await world.start("d0", "x0", keys_dir=keys, tokens=THRESHOLD_TOKENS)
    for worker in world.workers.values():
        worker.reply = count

    async def usual(first: int) -> set[str]:
        numbers = range(first, first + USUAL_PROMPTS)
        return {await ask(world, "alice", f"{number} {WORDS * repeats}") for number in numbers}

    before = await usual(0)
    for number in range(ODD_PROMPTS):
        await ask(world, "mallory", f"{number} {letter * ODD_LETTERS}")
    return before, await usual(USUAL_PROMPTS)


@each_poison
async def test_odd_texts_of_one_client_move_no_prompt_of_another(world, tmp_path, letter, repeats, place):
    assert await poisoned(world, tmp_path / "keys", letter, repeats) == ({place}, {place})


@each_poison
async def test_control_where_all_clients_share_one_estimator_they_do(
    world, tmp_path, monkeypatch, letter, repeats, place
):
    shared = auth.TokenEstimator()
    monkeypatch.setattr(auth, "TokenEstimator", lambda: shared)
    assert await poisoned(world, tmp_path / "keys", letter, repeats) == ({place}, {ELSEWHERE[place]})
