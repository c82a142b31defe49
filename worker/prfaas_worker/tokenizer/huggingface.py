"""Hugging Face's tokenizer.json through the `tokenizers` library, without transformers.

Two things differ from the library's own way. Its added tokens are taken out before it reads the file, for it would find
their letters in users' text. `Specials` puts them where the template does. And its decoder, which wants whole answers,
is replaced by a table of bytes a token. Byte-level BPE, which Qwen's models have, writes every byte as a printable
character.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec

from prfaas.errors import UNREADABLE, ConfigError
from prfaas_worker.tokenizer.base import Tokenizer, TokenTable, utf8
from prfaas_worker.tokenizer.chat_template import ChatTemplate, Special

# The front must not take the cores that the engine computes on: the library would start a thread on each.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import tokenizers


class _AddedToken(msgspec.Struct, frozen=True):
    id: int
    content: str
    special: bool = False
    lstrip: bool = False
    rstrip: bool = False


class _Model(msgspec.Struct, frozen=True):
    type: str = "BPE"


class HuggingFaceTokenizer(Tokenizer):
    def __init__(
        self,
        encoder: tokenizers.Tokenizer,
        specials: Mapping[str, Special],
        table: TokenTable,
        template: ChatTemplate | None,
    ):
        super().__init__(specials, table, template, _frame(encoder))
        self._encoder = encoder

    def _encode_pieces(self, pieces: Sequence[str]) -> list[list[int]]:
        for piece in pieces:
            utf8(piece)
        # Only the library's batch calls release the interpreter's lock.
        return [found.ids for found in self._encoder.encode_batch_fast(list(pieces), add_special_tokens=False)]


def huggingface_tokenizer(path: Path, template: ChatTemplate | None) -> HuggingFaceTokenizer:
    """Read tokenizer.json. Raises ConfigError if it is invalid or of an unsupported kind."""
    try:
        # Raw: the vocabulary as Python objects would take more memory than the tokenizer itself.
        parts = msgspec.json.decode(path.read_bytes(), type=dict[str, msgspec.Raw])
        added = msgspec.json.decode(parts.get("added_tokens", b"[]"), type=list[_AddedToken])
        model = msgspec.json.decode(parts["model"], type=_Model)
        decoder = msgspec.json.decode(parts["decoder"])
    except (*UNREADABLE, KeyError) as error:
        raise ConfigError(f"{path}: not a tokenizer: {error!r}") from error
    if model.type != "BPE":
        raise ConfigError(f"{path}: model.type is {model.type!r}; this worker reads BPE")
    kind = decoder.get("type") if isinstance(decoder, dict) else decoder
    if kind != "ByteLevel":
        raise ConfigError(f"{path}: decoder is {kind}; this worker reads ByteLevel")
    encoder = _build(parts | {"added_tokens": msgspec.Raw(b"[]")}, path)
    specials = {
        token.content: Special(
            token.id,
            hidden=token.special,
            # Runs of spaces are text that users write, and were split off in training wherever they stood.
            plain=not token.special and token.content.isspace(),
            strips_left=token.lstrip,
            strips_right=token.rstrip,
        )
        for token in added
    }
    table = TokenTable(_token_bytes(encoder, specials))
    return HuggingFaceTokenizer(encoder, specials, table, template)


def _build(parts: dict[str, msgspec.Raw], path: Path) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_buffer(msgspec.json.encode(parts))
    except Exception as error:  # the library raises no other type
        raise ConfigError(f"{path}: the tokenizers library refuses it: {error}") from error


def _frame(encoder: tokenizers.Tokenizer) -> tuple[list[int], list[int]]:
    """Return the post-processor's tokens before and after a text."""
    plain = encoder.encode("a", add_special_tokens=False).ids
    framed = encoder.encode("a", add_special_tokens=True).ids
    for start in range(len(framed) - len(plain) + 1):
        if framed[start : start + len(plain)] == plain:
            return framed[:start], framed[start + len(plain) :]
    return [], []


def _token_bytes(encoder: tokenizers.Tokenizer, specials: Mapping[str, Special]) -> Iterator[bytes]:
    """Yield the bytes of all ids in order; an id without a token has none."""
    added = {special.token_id: b"" if special.hidden else text.encode() for text, special in specials.items()}
    # The library counts tokens, not ids: where ids have gaps the last ones are beyond the count.
    ids = encoder.get_vocab(with_added_tokens=False).values()
    for token_id in range(max([*added, *ids], default=-1) + 1):
        piece = None if token_id in added else encoder.id_to_token(token_id)
        yield added.get(token_id, b"") if piece is None else _byte_level(piece)


def _alphabet() -> dict[str, int]:
    """Return the byte of each character in GPT-2's alphabet: printable bytes are themselves, others follow 255."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}


_ALPHABET: Final = _alphabet()


def _byte_level(piece: str) -> bytes:
    try:
        return bytes([_ALPHABET[character] for character in piece])
    except KeyError:
        return piece.encode()  # an entry outside of the alphabet is plain text
