"""Two real workers serve a family that transformers has: prefill in one, decode in the other, and every logit the same.

It is the one whose cache differs most from our own model's: keys, values and recurrent states in every layer.
"""

import importlib.util
import json
import random
import warnings
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.system

TINY = Path(__file__).parents[1] / "generic/tiny.py"
BYTES = {"tokenizer_class": "byte", "added_tokens_decoder": {}}


def write_checkpoint(family: str, directory: Path) -> Path:
    """A tiny checkpoint with random weights, and a tokenizer that it does not need: prompts here are token ids."""
    spec = importlib.util.spec_from_file_location("tiny_families", TINY)
    assert spec
    assert spec.loader
    tiny: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tiny)
    with warnings.catch_warnings():
        # Deprecations inside third-party imports say nothing about us.
        warnings.simplefilter("ignore")
        tiny.save(tiny.build(family), directory)
    (directory / "tokenizer_config.json").write_text(json.dumps(BYTES))
    return directory


async def test_a_prompt_prefilled_elsewhere_is_decoded_with_the_same_logits(client, launch, tmp_path):
    directory = write_checkpoint("falcon_h1", tmp_path)
    flags = "--model-source", str(directory), "--profile-seconds", "0", "--cache-mib", "64"
    started = launch("prefill", *flags, "--role", "prefill"), launch("decode", *flags)
    prefill, decode = [await worker.ready() for worker in started]
    for length in (1, 64, 150):
        prompt = random.Random(length).choices(range(3, 128), k=length)
        ask = {"prompt": prompt, "max_tokens": 12, "logprobs": 5}
        local = await client.complete(decode, **ask, cache_salt="local")
        remote = await client.complete(decode, prefill, **ask, cache_salt="remote")
        assert remote.status == 200, await remote.text()
        mine, theirs = [(await answer.json())["choices"][0]["logprobs"] for answer in (local, remote)]
        assert theirs["tokens"] == mine["tokens"]
        assert theirs["token_logprobs"] == pytest.approx(mine["token_logprobs"], abs=1e-6)
        assert int(remote.headers["x-prfaas-kv-bytes"]) > 0


async def test_a_family_that_is_not_served_is_refused_by_name(launch, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "minimax"}))
    worker = launch("refused", "--model-source", str(tmp_path))
    assert await worker.exit_code() == 1
    assert "minimax" in worker.log.read_text()
