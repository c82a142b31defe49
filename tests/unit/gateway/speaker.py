"""A worker that names its tokens and can continue another's answer, without a model; it dies where a test says."""

import asyncio
import json
from typing import Any

import msgspec
from aiohttp import web

from prfaas.wire import headers
from prfaas.wire.streams import STREAM_FIELD, StreamParams
from prfaas_gateway.openai import DONE

FINGERPRINT = "f"
TOKENS = 12
"""Of each choice: token i of choice c is 100 * c + i, and spells "c.i "."""
CHOICES = 2
BODY = b'{"model":"m","stream":true,"messages":[],"n":2}'


def text_of(choice: int) -> str:
    """Return what a choice says as a whole."""
    return "".join(f"{choice}.{number} " for number in range(TOKENS))


def speak(stream: StreamParams, *, with_ids: bool = True) -> bytes:
    """Return the stream from where the client is, as a worker sends it; an event names up to three tokens."""
    events = b""
    for number in range(0, TOKENS, 3):
        for choice in range(CHOICES):
            have = len(stream.drawn.get(choice, ()))
            new = range(max(have, number), number + 3)
            if choice not in stream.ended and new:
                events += _event(stream.created, choice, new, with_ids=with_ids)
    return events + DONE


def _event(created: int, choice: int, new: range, *, with_ids: bool) -> bytes:
    said: dict[str, Any] = {"index": choice, "delta": {"content": "".join(f"{choice}.{one} " for one in new)}}
    said["finish_reason"] = "stop" if new[-1] == TOKENS - 1 else None
    said["token_ids"] = [100 * choice + one for one in new] if with_ids else None
    body = {"created": created, "choices": [said]} | ({} if new[0] else {"system_fingerprint": FINGERPRINT})
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


def stream_of(body: bytes) -> StreamParams:
    """Return what the gateway says of a stream."""
    fields = json.loads(body)
    return msgspec.convert(fields[STREAM_FIELD], StreamParams, str_keys=True)


class Speaker:
    """A reply for a worker of the tests' world.

    Args:
        dies_at: the byte of its stream after which it dies; None: it does not.
        how: "resets", "ends" (an orderly end that is none) or "stalls".
        last_words: sent just before.

    """

    with_ids = True

    def __init__(self, dies_at: int | None = None, how: str = "resets", last_words: bytes = b""):
        self.dies_at = dies_at
        self.how = how
        self.last_words = last_words
        self.streams: list[StreamParams] = []

    async def __call__(self, request: web.Request, body: bytes) -> web.StreamResponse:
        stream = stream_of(body)
        self.streams.append(stream)
        assert stream.model == (FINGERPRINT if stream.continues else "")
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", headers.CACHED_TOKENS: "7"})
        await response.prepare(request)
        await response.write(speak(stream, with_ids=self.with_ids)[: self.dies_at])
        if self.dies_at is not None:
            await self._die(request, response)
        return response

    async def _die(self, request: web.Request, response: web.StreamResponse) -> None:
        if self.last_words:
            await response.write(self.last_words)
        if self.how == "stalls":
            await asyncio.Event().wait()
        elif self.how == "resets":
            # What was written is read first: else the reset would overtake it.
            await asyncio.sleep(0)
            assert request.transport is not None
            request.transport.close()


def read(body: bytes) -> dict[int, str]:
    """Return what a client read of each choice; raises where an event is damaged, stands twice, or is none."""
    texts: dict[int, str] = {}
    heads = set()
    *events, last = body.removesuffix(b"\n\n").split(b"\n\n")
    assert last == b"data: [DONE]", body
    for event in events:
        reply = json.loads(event.removeprefix(b"data: "))
        (choice,) = reply["choices"]
        assert choice["token_ids"] is None, "the ids are for the gateway"
        heads.add(reply["created"])
        texts[choice["index"]] = texts.get(choice["index"], "") + choice["delta"]["content"]
    assert len(heads) == 1
    return texts


WHOLE = {choice: text_of(choice) for choice in range(CHOICES)}
STREAM = speak(StreamParams(seed=1, created=1_795_425_279))
LENGTH = len(STREAM)
AFTER_AN_EVENT = STREAM.index(b"\n\n", LENGTH // 2) + 2
