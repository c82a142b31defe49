"""Resumes a broken stream at another worker, without a visible break for the client.

The gateway requests a resumable stream with the header RESUMABLE. It fixes the values that a second worker could not
know. Such values are the seed of a request whose body has none, and the time in every chunk. The worker then writes
comments behind its events. They name the events' tokens, one entry a choice (R is the control character 0x1e):

    data: {"id": ..., "choices": [{"index": 0, "text": "lo", ...}]}

    data: {"id": ..., "choices": [{"index": 1, "text": "", "finish_reason": "stop", ...}]}

    :R0 5 104,105;1 7 - stop;         choice 0: 5 characters so far, two new tokens; choice 1: no token, and its end

Comments are for the gateway, which keeps them and passes the events on (`split_comments`). JSON writes a line end and
R as escapes, so the first and the last bytes of a comment occur nowhere else: a relay finds them without parsing. A
stream may be cut only at the end of a comment: there the events and the named tokens agree.

To resume, the gateway calls the same path with a `Resume` document before the same body. The header RESUME has the
document's length. The next worker renders the prompt again and computes prompt and sent tokens. The worker replays the
sent tokens for the state of the text. That is a held-back beginning of a character or stop string. It checks that it
gets the same number of characters.
"""

import re
from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Final, NamedTuple, Self

import msgspec
from msgspec import Meta

from prfaas.errors import BadInputError

COMMENT: Final = b":\x1e"
"""The first bytes of every comment."""
CUT: Final = b";\n\n"
"""The last bytes of every comment: a stream may be cut after them."""
DONE: Final = b"data: [DONE]\n\n"
"""The last bytes of a whole stream."""
MAX_DOCUMENT_BYTES: Final = 16 << 20
"""Some 3 million tokens. A longer answer is not resumed."""
_HEADER: Final = re.compile(r"([0-9]{1,19}) ([0-9]{1,12})")

ResumeCount = Annotated[int, Meta(ge=0, lt=1 << 48)]


class ResumableHeader(NamedTuple):
    """The values that the gateway fixes for all workers of one request: 0 <= seed < 2**63, and unix seconds."""

    seed: int
    created: int

    def encode(self) -> str:
        """Return the value of RESUMABLE."""
        return f"{self.seed} {self.created}"

    @classmethod
    def read(cls, header: str) -> Self:
        """Read the value of RESUMABLE; raises BadInputError for a malformed one."""
        found = _HEADER.fullmatch(header)
        if found is None or int(found[1]) >= 1 << 63:
            raise BadInputError(f"the header for a resumable stream is {header[:60]!r}: want a seed and a time")
        return cls(int(found[1]), int(found[2]))


class TokenEntry(NamedTuple):
    """One entry of a comment: new tokens of a choice, its characters so far, and its finish reason, empty while it
    runs."""

    choice: int
    characters: int
    token_ids: Sequence[int]
    reason: str = ""


class SentChoice(msgspec.Struct, frozen=True, array_like=True):
    """The client's part of one choice: the tokens, the characters of text, and its finish reason."""

    token_ids: list[Annotated[int, Meta(ge=0, lt=1 << 32)]]
    characters: ResumeCount
    reason: Annotated[str, Meta(max_length=32)] = ""


class Resume(msgspec.Struct, frozen=True, array_like=True):
    """The document before the body of a request that is to be resumed. A choice without an entry has not begun."""

    fingerprint: Annotated[str, Meta(max_length=256)]
    """Fingerprint of the model that began the answer, from that answer's header RESUMABLE."""
    cached_tokens: ResumeCount
    """For the answer's usage: the counts of the worker that began."""
    choices: dict[int, SentChoice]

    @property
    def sent_tokens(self) -> int:
        """Tokens of the answer to compute again, as a prompt."""
        return sum(len(sent.token_ids) for sent in self.choices.values() if not sent.reason)


def comment(entries: Iterable[TokenEntry]) -> bytes:
    """Return the comment with these entries."""
    return COMMENT + b"".join(map(_encode, entries)) + b"\n\n"


def _encode(entry: TokenEntry) -> bytes:
    choice, characters, token_ids, reason = entry
    ids = b"%d" % token_ids[0] if len(token_ids) == 1 else ",".join(map(str, token_ids)).encode() or b"-"
    if reason:
        return b"%d %d %b %b;" % (choice, characters, ids, reason.encode())
    return b"%d %d %b;" % (choice, characters, ids)


def split_comments(data: bytes) -> tuple[bytes, bytes]:
    """Return the events in a part of a stream that ends at a cut, and its comments for `read_comments`."""
    first, *parts = data.split(COMMENT)
    split = [part.partition(CUT) for part in parts]
    events = b"".join((first, *(after for _, _, after in split)))
    return events, b"".join(COMMENT + entries + CUT for entries, _, _ in split)


def read_comments(data: bytes) -> Iterator[TokenEntry]:
    """Yield the entries of the comments in a part of a stream that ends at a cut.

    Raises BadInputError for an entry of another form, also for a number too large for a token.
    """
    for part in data.split(COMMENT)[1:]:
        for entry in part.partition(CUT)[0].split(b";"):
            try:
                choice, characters, ids, *reason = entry.split(b" ")
                tokens = array("I", map(int, ids.split(b",")) if ids != b"-" else ())
                yield TokenEntry(int(choice), int(characters), tokens, b" ".join(reason).decode())
            except (OverflowError, ValueError) as error:
                raise BadInputError(f"a comment of a stream is malformed: {error}") from error


def encode_resume(resume: Resume) -> bytes:
    """Return a document."""
    return msgspec.msgpack.encode(resume)


def decode_resume(data: bytes) -> Resume:
    """Read a document; raises BadInputError for a malformed one."""
    try:
        return msgspec.msgpack.decode(data, type=Resume)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise BadInputError(f"the data before the body are no resume document: {error}") from error
