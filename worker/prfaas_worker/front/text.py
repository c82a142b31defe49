"""Turns one choice's tokens into the text that may be shown now: whole characters, and nothing past a stop string; and
tells where in it each token begins.
"""

import codecs
from collections.abc import Mapping, Sequence

from prfaas_worker.front.tools.events import possible_beginning
from prfaas_worker.tokenizer import Tokenizer


class TextStream:
    """Text of one choice. Characters that may begin a stop string are held back until it is clear that they do not.

    Args:
        tokenizer: the model's.
        stop: strings that end the text before them.
        unstopped_tokens: so many first tokens end nothing, whatever they spell.
        shown: special tokens that add letters here, by id.

    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Sequence[str] = (),
        *,
        unstopped_tokens: int = 0,
        shown: Mapping[int, bytes] | None = None,
    ):
        self._token_bytes = tokenizer.token_bytes
        self._stop = stop
        self._unstopped_tokens = unstopped_tokens if stop else 0
        self._shown = shown
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self._held = ""
        self.stopped = False

    def push(self, token_ids: Sequence[int], *, final: bool) -> str:
        """Add tokens; return the text that is certain now. After a stop string was found nothing more comes."""
        if self.stopped:
            return ""
        if not self._unstopped_tokens:
            text = self._decode(self._bytes(token_ids), final)
            return self._cut(text, final=final) if self._stop else text
        free = min(self._unstopped_tokens, len(token_ids))
        self._unstopped_tokens -= free
        text = self._decode(self._bytes(token_ids[:free]), final and free == len(token_ids))
        return text + self.push(token_ids[free:], final=final) if free < len(token_ids) else text

    def _bytes(self, token_ids: Sequence[int]) -> bytes:
        if self._shown:
            return b"".join(self._shown.get(token) or self._token_bytes(token) for token in token_ids)
        if len(token_ids) == 1:
            return self._token_bytes(token_ids[0])
        return b"".join(map(self._token_bytes, token_ids))

    def _cut(self, text: str, *, final: bool) -> str:
        text = self._held + text
        # The one that is complete first, so that it does not matter how many tokens came at once.
        ends = [(place + len(stop), place) for stop in self._stop if (place := text.find(stop)) >= 0]
        if ends:
            self.stopped = True
            self._held = ""
            return text[: min(ends)[1]]
        keep = 0 if final else possible_beginning(text, self._stop)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


class TextOffsets:
    """Where the tokens of one choice begin in its text, in characters.

    A token that begins within a character has that character's place. Tokens from a stop string on are placed as if the
    text went on.
    """

    def __init__(self, tokenizer: Tokenizer, start: int):
        self._token_bytes = tokenizer.token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._characters = start

    def push(self, token_ids: Sequence[int]) -> list[int]:
        """Return the places of the next tokens."""
        return [self._place(self._token_bytes(token)) for token in token_ids]

    def _place(self, token: bytes) -> int:
        # The first byte shows whether what stood unfinished is a character that goes on, or damage that ended before.
        begun = self._decoder.decode(token[:1])
        unfinished, _ = self._decoder.getstate()
        place = self._characters + (len(begun) if unfinished else max(len(begun) - 1, 0))
        self._characters += len(begun) + len(self._decoder.decode(token[1:]))
        return place
