"""Two real workers serve Qwen3-Next: prefill in one, decode in the other, and every logit the same."""

import random

import pytest

pytestmark = pytest.mark.system


async def test_a_prompt_prefilled_elsewhere_is_decoded_with_the_same_logits(client, launch):
    flags = "--model-source", "builtin:qwen3-next-tiny", "--profile-seconds", "0", "--max-context", "2048"
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
