"""How a stream that broke goes on at another worker as if nothing had happened.

The gateway asks for a stream that can be resumed with the header RESUMABLE, which fixes what a second worker could not
know: the seed of a request whose body has none, and the time that every chunk tells. The worker then says with comment
lines, which readers of server-sent events skip, which tokens the events before them stand for:

    data: {"id": ..., "choices": [{"index": 0, "text": "lo", ...}]}

    : t 0 5 104,105;                         choice 0: 5 characters so far; these two tokens are new

    : t 0 7 - stop;                          no token, and the choice has ended

A stream may be cut at the end of a comment and nowhere else: there the events and the tokens told agree. JSON never
holds a line end, so `;\n\n` stands at these places alone, and who relays the stream finds them without reading it.

To go on, the same path is asked with the same body behind a `Resume` document, whose length the header RESUME tells.
The next worker renders the prompt anew, computes prompt and sent tokens, and reads the sent tokens once more to have
the state of the text: what is held back as a character's or a stop string's beginning, and which call of a tool is
open. That it comes to the same number of characters is checked.
"""

import re
from array import array
from collections.abc import Iterator, Sequence
from typing import Annotated, Final, NamedTuple, Self

import msgspec
from msgspec import Meta

from prfaas.errors import BadInputError

CUT: Final = b";\n\n"
"""The last bytes of every comment: behind them a stream may be cut."""
DONE: Final = b"data: [DONE]\n\n"
"""The last bytes of a whole stream."""
MAX_DOCUMENT_BYTES: Final = 16 << 20
"""Some 3 million tokens. A longer answer is not resumed."""
# Line ends in front, not anchors: a search for letters is eight times as fast.
_COMMENT: Final = re.compile(rb"\n: t (\d+) (\d+) ([\d,]+|-)(?: (\w+))?;")
_ANY_COMMENT: Final = re.compile(rb"\n: t [^;]*;")
_FIXED: Final = re.compile(r"([0-9]{1,19}) ([0-9]{1,12})")

Count = Annotated[int, Meta(ge=0, lt=1 << 48)]


class Fixed(NamedTuple):
    """What the gateway fixes for all workers that serve one request: 0 <= seed < 2**63, and unix seconds."""

    seed: int
    created: int

    def header(self) -> str:
        """Return the value of RESUMABLE."""
        return f"{self.seed} {self.created}"

    @classmethod
    def read(cls, header: str) -> Self:
        """Read the value of RESUMABLE.

        Raises:
            BadInputError: it is none.

        """
        found = _FIXED.fullmatch(header)
        if found is None or int(found[1]) >= 1 << 63:
            raise BadInputError(f"the header that makes a stream resumable is {header[:60]!r}: want a seed and a time")
        return cls(int(found[1]), int(found[2]))


class Told(NamedTuple):
    """One comment: new tokens of a choice, its characters so far, and why it ended, empty while it runs."""

    choice: int
    characters: int
    token_ids: "array[int]"
    reason: str


class Sent(msgspec.Struct, frozen=True, array_like=True):
    """What the client has of one choice: the tokens, the characters of text and of arguments, and why it ended."""

    token_ids: list[Annotated[int, Meta(ge=0, lt=1 << 32)]]
    characters: Count
    reason: Annotated[str, Meta(max_length=32)] = ""


class Resume(msgspec.Struct, frozen=True, array_like=True):
    """What goes before the body of a request that is to be resumed. A choice without an entry has not begun."""

    fingerprint: Annotated[str, Meta(max_length=256)]
    """Of the model that began the answer, as the header RESUMABLE of that answer has it."""
    cached_tokens: Count
    """As the answer's usage is to tell them: those of the worker that began."""
    choices: dict[int, Sent]

    @property
    def sent_tokens(self) -> int:
        """Tokens of the answer that are to be computed again, as a prompt is."""
        return sum(len(sent.token_ids) for sent in self.choices.values() if not sent.reason)


def comment(choice: int, characters: int, token_ids: Sequence[int], reason: str = "") -> bytes:
    """Return the comment that tells tokens of a choice."""
    ids = b"%d" % token_ids[0] if len(token_ids) == 1 else ",".join(map(str, token_ids)).encode() or b"-"
    if reason:
        return b": t %d %d %b %b;\n\n" % (choice, characters, ids, reason.encode())
    return b": t %d %d %b;\n\n" % (choice, characters, ids)


def comments_of(data: bytes) -> bytes:
    """Return the comments of a stretch of a stream without what stands between them, for `read_comments`."""
    return b"".join(_ANY_COMMENT.findall(b"\n" + data))


def read_comments(data: bytes) -> Iterator[Told]:
    """Yield the comments that a stretch of a stream holds.

    Raises:
        BadInputError: a number is larger than any token's or count's can be.

    """
    for choice, characters, ids, reason in _COMMENT.findall(b"\n" + data):
        try:
            tokens = array("I", map(int, ids.split(b",")) if ids != b"-" else ())
            yield Told(int(choice), int(characters), tokens, reason.decode())
        except (OverflowError, ValueError) as error:
            raise BadInputError(f"a comment of a stream tells no tokens: {error}") from error


def encode_resume(resume: Resume) -> bytes:
    """Return a document."""
    return msgspec.msgpack.encode(resume)


def decode_resume(data: bytes) -> Resume:
    """Read a document.

    Raises:
        BadInputError: it is none.

    """
    try:
        return msgspec.msgpack.decode(data, type=Resume)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise BadInputError(f"what stands before the body is no resume document: {error}") from error
