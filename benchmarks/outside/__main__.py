"""Other projects' tools against our own figures: they measure and compute the same, and agree within 5 %.

    prfaas bench outside [guidellm aiperf vllm kvcache-simulator] [-o json]

Without a name all of them. guidellm, aiperf and `vllm bench serve` ask one small installation for what our load maker
has asked it for, at the same times; kvcache-simulator computes sizes of caches and hits of a published trace. Each has
an environment of its own in the cache, of which the first run fetches 4 GB for guidellm, and 3 for vLLM.
"""

import asyncio
from collections.abc import Iterator
from typing import Annotated

import typer
from benchmarks.outside import cache_simulator
from benchmarks.outside.installation import ensure_programs, load_figures, loads
from benchmarks.outside.load_tools import LOAD_TOOLS
from benchmarks.report import Figure, run

from prfaas.errors import ConfigError

TOOLS = (cache_simulator.NAME, *LOAD_TOOLS)
Chosen = Annotated[list[str] | None, typer.Argument(help=f"Some of {', '.join(TOOLS)}; all when left out.")]


def figures(tools: Chosen = None) -> Iterator[Figure]:
    chosen = tools or TOOLS
    if unknown := set(chosen) - set(TOOLS):
        raise ConfigError(f"no outside tool is called {min(unknown)}: want some of {', '.join(TOOLS)}")
    if cache_simulator.NAME in chosen:
        yield from cache_simulator.figures()
    if makers := [name for name in LOAD_TOOLS if name in chosen]:
        yield from load_figures(asyncio.run(loads(ensure_programs(makers))))


if __name__ == "__main__":
    run("outside", __doc__, figures)
