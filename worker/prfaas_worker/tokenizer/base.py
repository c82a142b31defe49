"""The interface of all tokenizers: text to token ids and back. The three kinds encode a piece of text differently.

The byte tokenizer, that of the model that ships along, is here too; the others have a file each.
"""

from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from prfaas.errors import RequestError
from prfaas_worker.tokenizer.chat_template import ChatTemplate, Conversation, Special, Specials

BYTE_TOKENS = 256
Affix = tuple[list[int], list[int]]  # Special tokens before and after a plain prompt.


class TokenTable:
    """The bytes of every token id in one block. A list of 130,000 small objects would cost ten times the memory."""

    def __init__(self, tokens: Iterable[bytes]):
        ends, parts, length = array("I", [0]), [], 0
        for token in tokens:
            parts.append(token)
            length += len(token)
            ends.append(length)
        self._ends, self._data = ends, b"".join(parts)
        self._last = len(ends) - 2

    def __getitem__(self, token_id: int) -> bytes:
        if not 0 <= token_id <= self._last:
            return b""  # a vocabulary padded beyond its tokenizer
        return self._data[self._ends[token_id] : self._ends[token_id + 1]]


class Tokenizer(ABC):
    """The tokenizer of one model directory, safe in several threads. `specials` are by their letters; `table` has each
    token's bytes, none for a hidden special one; `template` is None for a model without chats."""

    def __init__(
        self, specials: Mapping[str, Special], table: TokenTable, template: ChatTemplate | None, frame: Affix = ([], [])
    ):
        self._before, self._after = frame
        self._specials = Specials(specials)
        self._texts = {special.token_id: text for text, special in specials.items()}
        self._table = table
        self._template = template
        self.token_bytes = table.__getitem__
        """Bytes that a token id adds to the text: none for a hidden special token or an id beyond the table."""

    @abstractmethod
    def _encode_pieces(self, pieces: Sequence[str]) -> list[list[int]]:
        """Token ids of each piece, as plain text."""

    @property
    def specials(self) -> Mapping[str, int]:
        return {text: special.token_id for text, special in self._specials.by_text.items()}

    def encode(self, text: str, *, framed: bool = True) -> list[int]:
        """Token ids of a plain prompt; `framed` adds special tokens. Raises RequestError for invalid Unicode."""
        token_ids = self._token_ids(self._specials.split_plain(text))
        return self._before + token_ids + self._after if framed else token_ids

    def encode_chat(self, conversation: Conversation) -> list[int]:
        """Token ids of a conversation, up to the assistant's answer. Raises RequestError if the template refuses it."""
        if self._template is None:
            raise RequestError("this model has no chat template; use /v1/completions", param="messages")
        return self._token_ids(self._specials.split(self._template.render(conversation, self._specials.guard)))

    def _token_ids(self, parts: Sequence[str | int]) -> list[int]:
        encoded = iter(self._encode_pieces([part for part in parts if isinstance(part, str)]))
        token_ids: list[int] = []
        for part in parts:
            if isinstance(part, int):
                token_ids.append(part)
            else:
                token_ids += next(encoded)
        return token_ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of a whole prompt, with special tokens; invalid bytes become U+FFFD."""
        texts = self._texts
        parts = (texts[token].encode() if token in texts else self.token_bytes(token) for token in token_ids)
        return b"".join(parts).decode("utf-8", "replace")


class ByteTokenizer(Tokenizer):
    """Ids 0..255 are bytes, higher ids special tokens. A plain prompt begins with `bos_id`."""

    def __init__(self, specials: Mapping[str, Special], bos_id: int | None, template: ChatTemplate | None):
        table = TokenTable(bytes([byte]) for byte in range(BYTE_TOKENS))
        super().__init__(specials, table, template, ([] if bos_id is None else [bos_id], []))

    def _encode_pieces(self, pieces: Sequence[str]) -> list[list[int]]:
        return [list(utf8(piece)) for piece in pieces]


def byte_tokenizer(config: Mapping[str, Any], template: ChatTemplate | None) -> ByteTokenizer:
    """Build the tokenizer of tokenizer_config.json; raises KeyError and its like for missing fields."""
    specials = {entry["content"]: Special(int(number)) for number, entry in config["added_tokens_decoder"].items()}
    bos_id = specials[config["bos_token"]].token_id if config.get("bos_token") else None
    return ByteTokenizer(specials, bos_id, template)


def utf8(text: str) -> bytes:
    """Return the text's bytes. Raises RequestError for half of a surrogate pair."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(f"the text has half of a surrogate pair at character {error.start}; send UTF-8") from error
