"""Streams that another worker can go on with, and going on with another's: the front's half of prfaas.wire.resume.

Nothing of an answer is kept that its tokens do not tell. So whoever begins an answer only tells them, and whoever goes
on reads them once more, without sending what they spell, and has the state in which the other was.
"""

from collections.abc import Callable
from typing import Final, NamedTuple

import msgspec
from aiohttp import web

from prfaas.errors import BadInputError, RequestError
from prfaas.wire import headers
from prfaas.wire.engine import Ready
from prfaas.wire.resume import MAX_DOCUMENT_BYTES, Fixed, Resume, Sent, comment, decode_resume
from prfaas_worker.front.answers import Piece
from prfaas_worker.front.checks import Served, require
from prfaas_worker.front.choices import Choice
from prfaas_worker.front.openai import Job, Prompt
from prfaas_worker.front.serving import Serving
from prfaas_worker.tokenizer import Tokenizer

TELL_TOKENS: Final = 32
"""So many tokens without text are told by themselves: they would be drawn anew otherwise."""
_SEED_STEP: Final = 0x9E3779B97F4A7C15  # odd, so that no two prompts of a request have one seed
_REASONS: Final = ("", "stop", "length", "tool_calls")

MakeJob = Callable[[bytes, Served, Tokenizer], Job]


class Asked(NamedTuple):
    """What the headers of a request say: what is fixed, None where nobody would resume; and a document's length."""

    fixed: Fixed | None
    document_bytes: int


class Line(NamedTuple):
    """One call of the engine: `choices` of the prompt number `place`, from the choice `first` on.

    With `sent` it is a single one that had begun.
    """

    place: int
    prompt: Prompt
    first: int
    choices: int
    sent: Sent | None = None

    @property
    def generated(self) -> list[int]:
        """Tokens of the answer that are known."""
        return self.sent.token_ids if self.sent else []


class Ledger:
    """Tells with which tokens each choice's events were made."""

    def __init__(self, resume: Resume | None):
        sent = resume.choices if resume else {}
        self._characters = {choice: one.characters for choice, one in sent.items()}
        self._untold: dict[int, list[int]] = {}

    def told(self, piece: Piece, event: bytes) -> bytes:
        """Return the events of a piece with its comment behind them; nothing where both can wait."""
        index = piece.index
        token_ids = [*self._untold.pop(index, ()), *piece.token_ids]
        if not event and len(token_ids) < TELL_TOKENS:
            self._untold[index] = token_ids
            return b""
        characters = self._characters[index] = self._characters.get(index, 0) + piece.characters
        return event + comment(index, characters, token_ids, piece.reason or "")


def read_asked(request: web.Request) -> Asked:
    """Read the headers; raises RequestError where they are out of order."""
    fixed, length = request.headers.get(headers.RESUMABLE), request.headers.get(headers.RESUME, "0")
    sound = length.isascii() and length.isdecimal() and len(length) < 10 and int(length) <= MAX_DOCUMENT_BYTES
    require(sound, headers.RESUME, f"is {length[:20]!r}: want a document's length, at most {MAX_DOCUMENT_BYTES}")
    require(fixed is not None or length == "0", headers.RESUME, f"needs {headers.RESUMABLE}")
    try:
        return Asked(Fixed.read(fixed) if fixed is not None else None, int(length))
    except BadInputError as error:
        raise RequestError(str(error), param=headers.RESUMABLE) from error


def reader(make: MakeJob, asked: Asked) -> Callable[[bytes, Served, Tokenizer], tuple[Job, Resume | None]]:
    """Return what reads a body, with a document before it if there is one."""

    def read(data: bytes, served: Served, tokenizer: Tokenizer) -> tuple[Job, Resume | None]:
        job = _seeded(make(data[asked.document_bytes :], served, tokenizer), asked.fixed)
        if not asked.document_bytes:
            return job, None
        try:
            resume = decode_resume(data[: asked.document_bytes])
        except BadInputError as error:
            raise RequestError(str(error), param=headers.RESUME) from error
        _check(resume, job, served)
        return job, resume

    return read


def fingerprint_of(serving: Serving, resume: Resume | None) -> str:
    """Return the fingerprint of the model here.

    Raises:
        RequestError: it is not the one that began the answer.

    """
    ready = serving.engine.ready.result()
    fingerprint = ready.fingerprint if isinstance(ready, Ready) else ""
    if resume is not None and resume.fingerprint != fingerprint:
        raise _refused("another model began this answer")
    return fingerprint


def lines(job: Job, resume: Resume | None) -> list[Line]:
    """Return what the engine is asked for: every choice that has not ended."""
    if resume is None:
        return [Line(place, prompt, 0, job.choices) for place, prompt in enumerate(job.prompts)]
    found = []
    for index in range(len(job.prompts) * job.choices):
        place, number = divmod(index, job.choices)
        sent = resume.choices.get(index)
        if sent is None or not sent.reason:
            found.append(Line(place, job.prompts[place], number, 1, sent))
    return found


def replay(choice: Choice, sent: Sent) -> None:
    """Bring a choice to where its text was broken off.

    Raises:
        RequestError: its tokens make another text than the one that was sent.

    """
    told = choice.replay(sent.token_ids)
    if told.reason is not None or told.characters != sent.characters:
        text = f"{sent.characters} characters of choice {choice.index} were sent, and its tokens make {told.characters}"
        raise _refused(text)


def _seeded(job: Job, fixed: Fixed | None) -> Job:
    """Return a job with the seed that was fixed, where its caller has given none."""
    if fixed is None or not job.unseeded:
        return job
    replace = msgspec.structs.replace
    seeds = [(fixed.seed + place * _SEED_STEP) % (1 << 63) for place in range(len(job.prompts))]
    prompts = [
        replace(prompt, sampling=replace(prompt.sampling, seed=seed))
        for prompt, seed in zip(job.prompts, seeds, strict=True)
    ]
    return replace(job, prompts=prompts)


def _check(resume: Resume, job: Job, served: Served) -> None:
    """Raise RequestError for a document that cannot be one of this request."""
    require(job.stream, headers.RESUME, "goes with stream: true")
    for index, sent in resume.choices.items():
        known = 0 <= index < len(job.prompts) * job.choices and sent.reason in _REASONS
        if not known or any(token >= served.vocab_size for token in sent.token_ids):
            raise _refused(f"choice {index} is none of this request's")
        most = job.prompts[index // job.choices].max_tokens
        if len(sent.token_ids) > most or (len(sent.token_ids) == most and not sent.reason):
            raise _refused(f"choice {index} has {len(sent.token_ids)} tokens of at most {most} and goes on")


def _refused(message: str) -> RequestError:
    return RequestError(message, status=409, code=headers.CODE_RESUME_REFUSED, param=headers.RESUME)
