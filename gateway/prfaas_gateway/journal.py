"""What one client has of a stream, so that another worker can go on with it.

All is well for nearly every stream, so nearly nothing is done for it: what goes to the client is kept as it came, and
read only when the worker dies. Where it has become long the comments alone are kept, some 20 bytes a token. That bounds
a stream's journal to RAW_BYTES and its tokens, which the model's context bounds.

A piece from the worker may end anywhere. What stands behind the last place where the stream may be cut waits for the
rest: half an event, or one whose tokens are not told yet, would have to be unsaid if the worker died now.
"""

from typing import Any, Final

import msgspec

from prfaas.errors import BadInputError
from prfaas.wire.resume import CUT, DONE, MAX_DOCUMENT_BYTES, Resume, Sent, comments_of, encode_resume, read_comments

RAW_BYTES: Final = 64 << 10
MAX_HELD_BYTES: Final = 4 << 20
"""A worker that sends so much without a place to cut is none of ours: it counts as dead."""
_ENDS: Final = (CUT, DONE)


class Journal:
    """One stream's journal.

    Args:
        fingerprint: of the model that began the answer.
        cached_tokens: of its prompt, as that worker counted them.

    """

    def __init__(self, fingerprint: str, cached_tokens: int):
        self._fingerprint = fingerprint
        self._cached_tokens = cached_tokens
        self._comments: list[bytes] = []
        self._raw: list[bytes] = []
        self._raw_bytes = 0
        self._held = b""
        self._last = b""
        self.pieces = 0
        """Passed on so far: it grows while the stream gets on."""

    def take(self, piece: bytes) -> bytes:
        """Take in what came from the worker, and return what may go to the client now.

        Raises:
            BadInputError: nowhere in so much may the stream be cut.

        """
        if self._held:
            piece = self._held + piece
            self._held = b""
        if not piece.endswith(_ENDS):
            cut = piece.rfind(CUT) + len(CUT) if CUT in piece else 0
            piece, self._held = piece[:cut], piece[cut:]
            if len(self._held) > MAX_HELD_BYTES:
                raise BadInputError(f"{MAX_HELD_BYTES} bytes of a stream that can be resumed tell of no token")
        if piece:
            self.pieces += 1
            self._last = piece
            self._raw.append(piece)
            self._raw_bytes += len(piece)
            if self._raw_bytes > RAW_BYTES:
                self._shorten()
        return piece

    @property
    def is_whole(self) -> bool:
        """Whether the client has all of it."""
        return self._last.endswith(DONE)

    def dying_words(self) -> tuple[bytes, bool]:
        """Return the error event that a worker ended with, and whether every worker would say it; else nothing.

        What else it had begun to say is forgotten: the next one begins behind the last cut.
        """
        held, self._held = self._held, b""
        error = _error(held)
        return (held, error.get("type") == "invalid_request_error") if error else (b"", False)

    @property
    def can_go_on(self) -> bool:
        """Whether what was told is sound, and not too much to be told again."""
        try:
            return len(self.document()) <= MAX_DOCUMENT_BYTES
        except BadInputError:
            return False

    def document(self) -> bytes:
        """Return what another worker needs to go on.

        Raises:
            BadInputError: what the worker told are no tokens.

        """
        return encode_resume(self.resume())

    def resume(self) -> Resume:
        """Return the document of all that the client has; raises as `document` does."""
        self._shorten()
        choices: dict[int, Sent] = {}
        for told in read_comments(b"".join(self._comments)):
            before = choices.get(told.choice)
            token_ids = before.token_ids if before else []
            token_ids += told.token_ids
            choices[told.choice] = Sent(token_ids, told.characters, told.reason)
        return Resume(self._fingerprint, self._cached_tokens, choices)

    def _shorten(self) -> None:
        """Keep of what was passed on the comments alone."""
        if self._raw:
            self._comments.append(comments_of(b"".join(self._raw)))
            self._raw, self._raw_bytes = [], 0


def _error(held: bytes) -> dict[str, Any]:
    """Return the error that the last event tells, empty if it is none."""
    *_, event = held.removesuffix(b"\n\n").split(b"\n\n")
    try:
        error = msgspec.json.decode(event.removeprefix(b"data: "))["error"]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, KeyError, TypeError):
        return {}
    return error if isinstance(error, dict) else {}
