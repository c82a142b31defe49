"""Sends a run's requests at their times, whatever the answers do, and notes when each answer's tokens came.

A request is sent at its time even if all before it wait. Its first token is timed from when it should have been sent.
So neither a slow system nor a slow client makes waits look shorter (coordinated omission). How late it was really sent
is noted, too: a client that is too slow makes them look longer.
"""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from functools import lru_cache
from typing import Final, Self

import aiohttp

from prfaas.errors import PeerError, PrfaasError
from prfaas.evaluate.record import AnsweredRequest, Loss
from prfaas.measure.answers import TokenStream
from prfaas.names import HUB
from prfaas.simulate.arrivals import BLOCK_TOKENS
from prfaas.simulate.request import Arrival
from prfaas.wire import headers
from prfaas.wire.trace import read_parts

_FIRST_LENGTHS: Final = (500, 2_000, 8_000, 500)
"""Of the prompts before a run: connections open, and the gateway learns how many bytes a token has."""
_LONGEST_SECONDS: Final = 3600.0
"""In the case's time."""
_LOSSES: Final[dict[int, Loss]] = {429: "refused", 504: "timeout"}
"""By the gateway's status: 503 says that nothing serves."""
_SAY_EVERY_SECONDS: Final = 10.0
_REMEMBERED_BLOCKS: Final = 20_000


class Driver:
    """Sends requests to one gateway; times on the clock are `stretch` times those of the case."""

    def __init__(self, session: aiohttp.ClientSession, url: str, model: str, stretch: float, seed: int):
        self._session, self._url, self._model, self._stretch = session, url, model, stretch
        self._rng = random.Random(f"prompts of {seed}")  # noqa: S311 - the same prompts each time are the purpose
        self._open = 0

    @classmethod
    @asynccontextmanager
    async def connected(cls, url: str, model: str, stretch: float, seed: int) -> AsyncIterator[Self]:
        timeout = aiohttp.ClientTimeout(total=_LONGEST_SECONDS * stretch)
        async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
            yield cls(session, url, model, stretch, seed)

    async def warm_up(self, longest_tokens: int) -> None:
        """Send the prompts before a run, none of them longer. Raises PeerError if one is not answered."""
        for tokens in _FIRST_LENGTHS:
            answer = await self._ask(Arrival(0.0, min(tokens, longest_tokens), 1), time.monotonic())
            if answer.error:
                raise PeerError(f"the system does not answer before the run begins: {answer.error}")

    async def run(self, arrivals: Iterable[Arrival], say: Callable[[str], None]) -> tuple[AnsweredRequest, ...]:
        """Send all requests, and return their answers in order of arrival."""
        requests = list(arrivals)
        began = said = time.monotonic()
        async with asyncio.TaskGroup() as group:  # an interruption ends the requests, too
            tasks: list[asyncio.Task[AnsweredRequest]] = []
            for request in requests:
                at = began + request.at_seconds * self._stretch
                await asyncio.sleep(max(0.0, at - time.monotonic()))
                tasks.append(group.create_task(self._ask(request, at)))
                if time.monotonic() - said > _SAY_EVERY_SECONDS:
                    said = time.monotonic()
                    say(f"{len(tasks)} of {len(requests)} requests sent, {self._open} under way")
        return tuple(task.result() for task in tasks)

    async def _ask(self, request: Arrival, at: float) -> AnsweredRequest:
        """Send one prompt. It begins with its blocks, and no cache knows the rest."""
        self._open += 1
        known = "".join(_text_of(block) for block in request.blocks)
        new_tokens = request.input_tokens - len(known)
        prompt = known + self._rng.randbytes(new_tokens // 2 + 1).hex()[:new_tokens]
        body = {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": request.output_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        stream = TokenStream(self._url, at)
        sent_late_seconds = (time.monotonic() - at) / self._stretch
        try:
            async with self._session.post(f"{self._url}/v1/completions", json=body) as response:
                if response.status != 200:
                    why = f"{response.status}: {(await response.text())[:300]}"
                    return self._lost(request, _LOSSES.get(response.status, "failure"), why)
                async for piece in response.content.iter_any():
                    stream.feed(piece, time.monotonic())
                answer = stream.end()
                head = response.headers
                parts = read_parts(head.get(headers.TTFT_SECONDS, ""))
        except TimeoutError:
            return self._lost(request, "timeout", f"no answer ended within {_LONGEST_SECONDS * self._stretch:g} s")
        except (aiohttp.ClientError, PrfaasError) as error:
            return self._lost(request, "failure", f"{type(error).__name__}: {error}")
        finally:
            self._open -= 1
        return AnsweredRequest(
            at_seconds=request.at_seconds,
            prompt_tokens=answer.prompt_tokens,
            sent_late_seconds=sent_late_seconds,
            ttft_seconds=answer.first_seconds / self._stretch,
            seconds=(answer.marks[-1].seconds - at) / self._stretch,
            offloaded=head.get(headers.PREFILL_CLUSTER, HUB) != HUB,
            fallback=_fell_back(head),
            parts={name: seconds / self._stretch for name, seconds in parts.items()},
        )

    def _lost(self, request: Arrival, loss: Loss, why: str) -> AnsweredRequest:
        return AnsweredRequest(at_seconds=request.at_seconds, prompt_tokens=request.input_tokens, lost=loss, error=why)


@lru_cache(_REMEMBERED_BLOCKS)
def _text_of(block: int) -> str:
    """Return the text of a block: a token a character, the same wherever it has this name."""
    return random.Random(f"block {block}").randbytes(BLOCK_TOKENS // 2).hex()  # noqa: S311 - equal text is the purpose


def _fell_back(head: Mapping[str, str]) -> bool:
    """Return whether a request was not served as it was routed; then its decode instance has computed the prompt, which
    no system of a case has planned. The outcome names only offloads that failed."""
    computed = head.get(headers.PREFILL_INSTANCE)
    is_own = computed is not None and computed == head.get(headers.DECODE_INSTANCE)
    return is_own or head.get(headers.OUTCOME, "ok") != "ok"
