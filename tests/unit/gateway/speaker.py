"""A worker that names its tokens and can continue another's answer, without a model; it dies where a test says."""

import asyncio
import json

from aiohttp import web

from prfaas.wire import headers
from prfaas.wire.resume import DONE, ResumableHeader, Resume, TokenEntry, comment, decode_resume

FINGERPRINT = "f"
TOKENS = 12
"""Of each choice: token i of choice c is 100 * c + i, and spells "c.i "."""
CHOICES = 2


def text_of(choice: int) -> str:
    """Return what a choice says as a whole."""
    return "".join(f"{choice}.{number} " for number in range(TOKENS))


def speak(resume: Resume, fixed: ResumableHeader, tokens: int = TOKENS) -> bytes:
    """Return the stream from where `resume` stands, as one worker sends it; an event tells up to three tokens."""
    stream = b""
    sent = {choice: len(one.token_ids) for choice, one in resume.choices.items()}
    for number in range(0, tokens, 3):
        for choice in range(CHOICES):
            have = sent.get(choice, 0)
            if choice in resume.choices and resume.choices[choice].reason:
                continue
            new = range(max(have, number), min(number + 3, tokens))
            if not new:
                continue
            text = "".join(f"{choice}.{one} " for one in new)
            reason = "stop" if new[-1] == tokens - 1 else None
            event = {"created": fixed.created, "index": choice, "text": text, "reason": reason}
            # Two events for one comment: neither may go to the client without the other.
            for part in (text[:2], text[2:]):
                stream += b"data: " + json.dumps(event | {"text": part}).encode() + b"\n\n"
            characters = sum(len(f"{choice}.{one} ") for one in range(new[-1] + 1))
            stream += comment([TokenEntry(choice, characters, [100 * choice + one for one in new], reason or "")])
    return stream + DONE


class Speaker:
    """A reply for a worker of the tests' world.

    Args:
        dies_at: the byte of its stream after which it dies; None: it does not.
        how: "resets", "ends" (an orderly end that is none) or "stalls".
        last_words: sent just before.

    """

    cached_tokens = "7"

    def __init__(self, dies_at: int | None = None, how: str = "resets", last_words: bytes = b""):
        self.dies_at = dies_at
        self.how = how
        self.last_words = last_words
        self.resumes: list[Resume | None] = []

    async def __call__(self, request: web.Request, body: bytes) -> web.StreamResponse:
        size = int(request.headers.get(headers.RESUME, "0"))
        resume = decode_resume(body[:size]) if size else None
        self.resumes.append(resume)
        assert resume is None or resume.fingerprint == FINGERPRINT
        stream = speak(resume or Resume(FINGERPRINT, 0, {}), ResumableHeader.read(request.headers[headers.RESUMABLE]))
        fields = {
            "Content-Type": "text/event-stream",
            headers.RESUMABLE: FINGERPRINT,
            headers.CACHED_TOKENS: self.cached_tokens,
        }
        response = web.StreamResponse(headers=fields)
        await response.prepare(request)
        await response.write(stream[: self.dies_at])
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
        heads.add(reply["created"])
        texts[reply["index"]] = texts.get(reply["index"], "") + reply["text"]
    assert len(heads) == 1
    return texts


WHOLE = {choice: text_of(choice) for choice in range(CHOICES)}
FIXED = ResumableHeader(1, 1_700_000_000)
STREAM = speak(Resume(FINGERPRINT, 0, {}), FIXED)
LENGTH = len(STREAM)
AFTER_AN_EVENT = STREAM.index(b"\n\n", LENGTH // 2) + 2
