"""What `prfaas profile measure` finds, against the same server afterwards: times to the first token, predicted and met.

    prfaas bench profile_measure [worker vllm] [-o json]

Four lengths that were no points of the profile, each alone, and in Poisson arrivals that keep one instance half busy.
Pollaczek and Khinchine say what the waits add. The mean of a few hundred waits is off by several per cent by chance. So
of many draws of arrivals that one is sent whose waits, in a queue with the predicted times, come nearest to it.
"""

import random
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from itertools import accumulate
from pathlib import Path
from typing import Annotated

import typer
from benchmarks.report import Figure, run, say
from benchmarks.worker.process import running
from tests.vllm.engines import EngineHost
from tests.vllm.servers import vllm_servers

from prfaas.capacity.profile import prefill_seconds
from prfaas.cli.measured_server import HttpServer
from prfaas.errors import ConfigError
from prfaas.measure.answers import CacheBytes
from prfaas.measure.session import Session, reach_of
from prfaas.wire.profile import Profile
from prfaas_sandbox.progress import progress
from prfaas_sandbox.vllm import ensure_vllm
from prfaas_worker.assets import model_directory

MAX_TOKENS = 4096
LENGTHS = (384, 768, 1536, 3072)
REPEATS = 15
LOAD = 0.5
ARRIVALS = 300
DRAWS = 500
REACH_PERCENT = 10.0
VOCABULARY = 256
# The sizes of the caches change no time; the command reads or asks for them.
CACHE = CacheBytes(1, 1, "nothing")


@contextmanager
def worker() -> Iterator[str]:
    with running() as one:
        yield one.url


@contextmanager
def vllm(model: str = "builtin:qwen3-next-tiny", *flags: str) -> Iterator[str]:
    """Start vLLM with a small model, and give its URL when it is ready."""
    with progress() as report:
        python = ensure_vllm(report)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        host = EngineHost(python, Path(folder), model_directory(model))
        stack.callback(host.close)
        yield stack.enter_context(vllm_servers(host))(*flags).wait_ready().url


SERVERS = {"worker": worker, "vllm": vllm}
Chosen = Annotated[list[str] | None, typer.Argument(help=f"Some of {', '.join(SERVERS)}; all when left out.")]


def figures(servers: Chosen = None) -> Iterator[Figure]:
    if unknown := set(servers or ()) - set(SERVERS):
        raise ConfigError(f"no server is called {min(unknown)}: want some of {', '.join(SERVERS)}")
    for name in servers or SERVERS:
        with SERVERS[name]() as url, HttpServer(url) as server:
            yield from compared(name, server)


def compared(name: str, server: HttpServer) -> Iterator[Figure]:
    """Measure a server, then meet its times."""
    card, rng, began = server.card(), random.Random(), time.monotonic()
    found = Session(server, reach_of(card, MAX_TOKENS), rng, say).measure(card, name, CACHE)
    for note in found.notes:
        say(f"note: {note}")
    yield Figure(name=f"{name}: the measurement", value=time.monotonic() - began, unit="s", reach=300)
    order = sorted(LENGTHS * REPEATS, key=lambda _: rng.random())
    lone = defaultdict[int, list[float]](list)
    for tokens in order:
        lone[tokens].append(first_seconds(server, rng, tokens))
    off = 0.0
    for tokens in LENGTHS:
        predicted = prefill_seconds(found.profile, tokens)
        loaded = loaded_seconds(found.profile, tokens)
        arrivals = usual(predicted, loaded - predicted, rng)
        say(f"{ARRIVALS} prompts of {tokens:,} tokens in {arrivals[-1]:.0f} s")
        rows = (
            ("alone", predicted, statistics.median(lone[tokens])),
            (f"at {LOAD:.0%}", loaded, statistics.mean(met(server, arrivals, tokens))),
        )
        for load, ours, theirs in rows:
            rival = {"rival": "predicted", "rival_value": 1000 * ours}
            yield Figure(name=f"{name}: {tokens:,} tokens {load}", value=1000 * theirs, unit="ms", **rival)
            off = max(off, abs(ours / theirs - 1))
    yield Figure(name=f"{name}: largest error of a prediction", value=100 * off, unit="%", reach=REACH_PERCENT)


def loaded_seconds(profile: Profile, tokens: int) -> float:
    """Return the mean time to the first token at this load, by Pollaczek and Khinchine, of prompts of one length."""
    return prefill_seconds(profile, tokens) * (1 + LOAD / 2 / (1 - LOAD))


def usual(predicted: float, wait: float, rng: random.Random) -> list[float]:
    """Return the arrivals, in seconds, whose mean wait is the most usual of many draws."""

    def unusual(arrivals: Sequence[float]) -> float:
        free = waited = 0.0
        for at in arrivals:
            waited += max(0.0, free - at)
            free = max(free, at) + predicted
        return abs(waited / len(arrivals) - wait)

    def drawn() -> list[float]:
        return list(accumulate(rng.expovariate(LOAD / predicted) for _ in range(ARRIVALS)))

    return min((drawn() for _ in range(DRAWS)), key=unusual)


def met(server: HttpServer, arrivals: Sequence[float], tokens: int) -> list[float]:
    """Return the times to the first token of prompts that are sent at these times."""
    rng, began = random.Random(), time.monotonic()
    with ThreadPoolExecutor(64) as pool:
        sent = []
        for at in arrivals:
            time.sleep(max(0.0, began + at - time.monotonic()))
            sent.append(pool.submit(first_seconds, server, rng, tokens))
        return [one.result() for one in sent]


def first_seconds(server: HttpServer, rng: random.Random, tokens: int) -> float:
    (answer,) = server.ask([[int(VOCABULARY * rng.random()) for _ in range(tokens)]], 1)
    return answer.first_seconds


if __name__ == "__main__":
    run("profile_measure", __doc__, figures)
