"""vLLM's own check of disaggregated hybrids, on three OpenAI ports: the source, the destination, and what joins them.

The claims and bounds are those of tests/v1/kv_connector/nixl_integration/test_hybrid_pd_consistency.py of the vLLM
project (Apache-2.0, commit 1468ac9), rewritten here. For hybrids the source stops one token short, and the
destination computes that token with another kernel. So log probabilities need only be close, and a lost or stale state
moves them by several nats.
"""

from .servers import post

MAX_LOGPROB_DELTA = 1.5
NUM_TOKENS, COMPARED_TOKENS = 8, 4
PROMPTS = {
    "short": "Red Hat is ",
    "mid": "The best part about working on vLLM is that I got to meet so many people across various different "
    "organizations like",
    # About 6,500 tokens, as theirs has: a byte is a token here.
    "long": " ".join(f"word{i}" for i in range(830)),
}


def logprobs_of(url: str, prompt: str) -> list[float]:
    """The log probabilities of a greedy answer."""
    sampling = {"temperature": 0, "max_tokens": NUM_TOKENS, "logprobs": 1, "seed": 0}
    return post(f"{url}/v1/completions", prompt=prompt, **sampling)["choices"][0]["logprobs"]["token_logprobs"]


def check_consistency(source: str, destination: str, joined: str) -> None:
    """Compare what one server answers with what both answer together."""
    for name, prompt in PROMPTS.items():
        # What joins them is first: a destination that has answered the prompt alone would take it from its own cache.
        together, alone, other = (logprobs_of(url, prompt) for url in (joined, source, destination))
        assert len(together) == NUM_TOKENS, name
        pairs = list(zip(alone, together, strict=True))[:COMPARED_TOKENS]
        assert max(abs(a - b) for a, b in pairs) < MAX_LOGPROB_DELTA, (name, alone, together)
        assert max(abs(a - b) for a, b in zip(alone, other, strict=True)) < MAX_LOGPROB_DELTA, (name, alone, other)
