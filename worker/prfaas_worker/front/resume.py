"""Makes streams that another worker can resume, and resumes those of others: the front's half of `prfaas.wire.resume`.

The tokens of an answer determine its whole state. So the worker that begins an answer sends them in comments, to a
caller that asks for them. The worker that resumes it reads them once more, without sending their text. Then it has the
state that the first one had.
"""

from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from prfaas.errors import BadInputError, RequestError
from prfaas.wire import headers
from prfaas.wire.engine import Generate
from prfaas.wire.resume import (
    MAX_DOCUMENT_BYTES,
    ResumableHeader,
    Resume,
    SentChoice,
    TokenEntry,
    comment,
    decode_resume,
)
from prfaas_worker.front.openai_in import Job
from prfaas_worker.front.openai_out import ChoiceDetokenizer, Piece
from prfaas_worker.front.serving import ServedModel, require

COMMENT_TOKENS: Final = 32
"""So many tokens without text get an entry without an event: otherwise they would be drawn again."""
_REASONS: Final = ("", "stop", "length")


class TokenComments:
    """Adds comments to a stream: the tokens of each choice's events."""

    def __init__(self, resume: Resume | None):
        sent = resume.choices if resume else {}
        self._characters = {choice: one.characters for choice, one in sent.items()}
        self._pending: dict[int, list[int]] = {}

    def add(self, pieces: Sequence[Piece], events: Sequence[bytes]) -> bytes:
        """Return the events of pieces with one comment behind them all; nothing if every piece can wait."""
        found = map(self._entry, pieces, events)
        entries = [entry for entry in found if entry is not None]
        return b"".join((*events, comment(entries))) if entries else b""

    def _entry(self, piece: Piece, event: bytes) -> TokenEntry | None:
        """Return the entry of a piece; None if there is no event, and its tokens can wait for the next one."""
        index, reason = piece.index, piece.reason or ""
        token_ids = [*self._pending.pop(index, ()), *piece.token_ids]
        if not event and len(token_ids) < COMMENT_TOKENS:
            self._pending[index] = token_ids
            return None
        characters = self._characters[index] = self._characters.get(index, 0) + len(piece.text)
        # Of a choice that has ended only the number of its tokens matters. A stop string had some of them cut off.
        return TokenEntry(index, characters, [0] * len(token_ids) if reason else token_ids, reason)


def read_resume_headers(http_headers: Mapping[str, str]) -> tuple[ResumableHeader | None, int]:
    """Return the header RESUMABLE (None: not resumable) and the length of the resume document. Raises RequestError if
    the headers are invalid."""
    fixed, length = http_headers.get(headers.RESUMABLE), http_headers.get(headers.RESUME, "0")
    sound = length.isascii() and length.isdecimal() and len(length) < 10 and int(length) <= MAX_DOCUMENT_BYTES
    require(sound, headers.RESUME, f"is {length[:20]!r}: want a document's length, at most {MAX_DOCUMENT_BYTES}")
    require(fixed is not None or length == "0", headers.RESUME, f"needs {headers.RESUMABLE}")
    try:
        return (None if fixed is None else ResumableHeader.read(fixed)), int(length)
    except BadInputError as error:
        raise RequestError(str(error), param=headers.RESUMABLE) from error


def read_resume(document: bytes, job: Job, served: ServedModel) -> Resume:
    """Read the document before a body. Raises RequestError if it is invalid, or of another request or model."""
    try:
        resume = decode_resume(document)
    except BadInputError as error:
        raise RequestError(str(error), param=headers.RESUME) from error
    if resume.fingerprint != served.fingerprint:
        raise _refusal("another model began this answer")
    require(bool(job.body.stream), headers.RESUME, "needs stream: true")
    for index, sent in resume.choices.items():
        known = 0 <= index < len(job.prompts) * job.choices and sent.reason in _REASONS
        if not known or any(token >= served.vocab_size for token in sent.token_ids):
            raise _refusal(f"choice {index} is none of this request's")
        most = job.prompts[index // job.choices].max_tokens
        if len(sent.token_ids) > most or (len(sent.token_ids) == most and not sent.reason):
            raise _refusal(f"choice {index} has {len(sent.token_ids)} tokens of at most {most} and has not ended")
    return resume


def remaining_messages(job: Job, resume: Resume | None) -> dict[int, Generate]:
    """Return the messages for every unfinished choice, by the index of their first choice."""
    if resume is None:
        return {place * job.choices: prompt for place, prompt in enumerate(job.prompts)}
    messages = {}
    for index in range(len(job.prompts) * job.choices):
        place, number = divmod(index, job.choices)
        sent = resume.choices.get(index)
        if sent is None or not sent.reason:
            generated = sent.token_ids if sent else []
            prompt = job.prompts[place]
            messages[index] = msgspec.structs.replace(prompt, choices=1, choice=number, generated=generated)
    return messages


def replay(choice: ChoiceDetokenizer, sent: SentChoice) -> None:
    """Bring a choice to the end of its sent text. Raises RequestError if its tokens make another text."""
    piece = choice.replay(sent.token_ids)
    if piece.reason is not None or len(piece.text) != sent.characters:
        text = f"{sent.characters} characters of choice {choice.index} were sent"
        raise _refusal(f"{text}, and its tokens make {len(piece.text)}")


def _refusal(message: str) -> RequestError:
    return RequestError(message, status=409, code=headers.CODE_RESUME_REFUSED, param=headers.RESUME)
