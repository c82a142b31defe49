"""kvcache-simulator, by the lab that wrote the paper, beside our figures: sizes of caches, and hits in a trace.

Sizes are those of our planner, to the byte: of a state and of each token.

Hit rates are those of our simulator's prefix cache on the published conversations: the tokens that are found, of all in
the later half of the requests, as the tool counts. It keeps attention alone, as if a state cost nothing and lay at the
end of every block. So does ours for the comparison, and what states really cost is shown beside it. The tool also keeps
blocks that are not full, which only the very same prompt meets again. Ours keeps none, so it has more room, and a
small cache finds some more.
"""

import json
import math
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks.outside.environments import ensure_tool, version_of
from benchmarks.prefix_cache import Line, read_lines, trace_file
from benchmarks.report import Figure, say

from prfaas.capacity.models import MODEL_CACHES, ModelCache
from prfaas.errors import PeerError
from prfaas.simulate.arrivals import MOONCAKE_BLOCK_TOKENS
from prfaas.simulate.cache import PrefixCache
from prfaas_sandbox.progress import progress

NAME: Final = "kvcache-simulator"
MODELS: Final = {
    "kimi-k3": "kimi-k3",
    "qwen3.5-397b": "qwen3.5-397b-a17b",
    "qwen3.5-122b": "qwen3.5-122b-a10b",
    "qwen3.5-35b": "qwen3.5-35b-a3b",
    "qwen3.5-27b": "qwen3.5-27b",
}
"""Our names and the tool's; it knows neither Kimi Linear nor Qwen3-Next."""
LENGTHS: Final = (1_024, 131_072)
HITS_OF: Final = "kimi-k3"
BUDGETS_GIB: Final = (128, 512, 1024)
REACH: Final = 0.05
SECONDS: Final = 300.0
SIZES: Final = """
import json, sys
from kvcache_sim.calculator import calculate_cache_size, load_models_data, models_by_id
data, (lengths, *names) = load_models_data(), sys.argv[1:]
models = models_by_id(data)
print(json.dumps([
    [
        calculate_cache_size(
            models[name], tokens=tokens, include_linear_attention_state=True, models_data=data
        ).total_bytes
        for tokens in json.loads(lengths)
    ]
    for name in names
]))
"""


class AttentionCache(PrefixCache):
    """Our simulator's cache, of which a match needs no state."""

    def match(self, blocks: Sequence[int], tokens: int) -> int:
        return self._attention_blocks(blocks, tokens) * self._block_tokens


def figures() -> Iterator[Figure]:
    with progress() as report:
        programs = ensure_tool(NAME, report)
    label = f"{NAME} {version_of(NAME)}"
    sizes = asked([programs / "python", "-c", SIZES, json.dumps(LENGTHS), *MODELS.values()])
    for model, theirs in zip(MODELS, sizes, strict=True):
        off = max(abs(size - one) for size, one in zip(sizes_of(MODEL_CACHES[model]), theirs, strict=True))
        lengths = " and ".join(f"{length:,}" for length in LENGTHS)
        yield Figure(name=f"{label}: {model}, cache of {lengths} tokens off by", value=off, unit="bytes", reach=0)
    trace = trace_file()
    say(f"{label} counts the hits of {trace}")
    yield from hit_figures(label, read_lines(trace), asked(command(programs, trace)))


def asked(words: Sequence[str | Path]) -> Any:
    """Return what a program of the tool's environment prints, which is JSON. Raises PeerError if it fails."""
    done = subprocess.run(words, capture_output=True, text=True, timeout=SECONDS, check=False)
    if done.returncode:
        raise PeerError(f"{words[0]} ended with {done.returncode}: {done.stderr[-1000:]}")
    return json.loads(done.stdout)


def command(programs: Path, trace: Path) -> list[str | Path]:
    """Return how the tool is called, in Python alone: its other way needs a compiler."""
    words: list[str | Path] = [
        programs / NAME,
        "run",
        "--trace",
        trace,
        "--model",
        MODELS[HITS_OF],
        "--policies",
        "lru",
    ]
    words += ["--block-size", str(MOONCAKE_BLOCK_TOKENS), "--budgets-gib", ",".join(map(str, BUDGETS_GIB))]
    return [*words, "--backend", "python", "--no-progress", "--format", "json"]


def sizes_of(cache: ModelCache) -> list[int]:
    return [cache.state_bytes + cache.token_bytes * length for length in LENGTHS]


def hit_figures(label: str, lines: Sequence[Line], found: dict[str, Any]) -> Iterator[Figure]:
    """Yield the hit rates of both: those that the tool has found, and ours of the same lines."""
    model, block = MODEL_CACHES[HITS_OF], MOONCAKE_BLOCK_TOKENS
    points = [(f"{one['gib']:,g} GiB", one["gib"] * 2**30, one["results"]["lru"]["hitRate"]) for one in found["points"]]
    reach = len(BUDGETS_GIB)  # the tool leaves out a cache that it cannot fill
    yield Figure(name=f"{label}: caches compared", value=len(points), unit="", better="higher", reach=reach)
    for size, budget_bytes, theirs in (*points, ("no bounds", math.inf, found["hitRateCeiling"])):
        alone = hit_rate(lines, AttentionCache(budget_bytes, block, model.token_bytes, 0))
        states = hit_rate(lines, PrefixCache(budget_bytes, block, model.token_bytes, model.state_bytes))
        name, rival = f"{HITS_OF}, {size}: hit rate", {"rival": label, "rival_value": theirs}
        yield Figure(name=f"{name} of attention alone", value=alone, unit="", better="higher", **rival)
        yield Figure(
            name=f"{name} of attention alone, off by", value=abs(alone / theirs - 1), unit="of it", reach=REACH
        )
        yield Figure(name=f"{name} with states", value=states, unit="", better="higher", **rival)


def hit_rate(lines: Sequence[Line], cache: PrefixCache) -> float:
    """Return the share of the tokens of the later half of the requests that a cache has when they come."""
    hits = tokens = 0
    for place, line in enumerate(lines):
        if place >= len(lines) // 2:
            hits += cache.match(line.hash_ids, line.input_length)
            tokens += line.input_length
        cache.insert(line.hash_ids, line.input_length)
    return hits / tokens
