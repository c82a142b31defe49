"""Hugging Face's tokenizer.json through the `tokenizers` library, without transformers.

Two things differ from the library's own way. Its added tokens are taken out before it reads the file, for it would find
their letters in users' text. `Specials` puts them where the template does. And its decoder, which wants whole answers,
is replaced by a table of bytes a token. The table is built for the two alphabets that generating models use. Byte-level
BPE writes every byte as a printable character. SentencePiece has U+2581 for a space and <0xNN> for lone bytes.
"""

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from prfaas.errors import ConfigError
from prfaas_worker.tokenizer.base import Tokenizer, TokenTable, utf8
from prfaas_worker.tokenizer.chat_template import ChatTemplate, Special

# The front must not take the cores that the engine computes on: the library would start a thread on each.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import tokenizers

_SPACE: Final = "\u2581"
_LONE_BYTE: Final = re.compile(r"<0x([0-9A-F]{2})>\Z")


class _AddedToken(msgspec.Struct, frozen=True):
    id: int
    content: str
    special: bool = False
    lstrip: bool = False
    rstrip: bool = False


class _Model(msgspec.Struct, frozen=True):
    type: str = "BPE"


class _Encoders(NamedTuple):
    """The library's tokenizers for a piece at the start of a text, and for one after other text."""

    first: tokenizers.Tokenizer
    inner: tokenizers.Tokenizer


class HuggingFaceTokenizer(Tokenizer):
    def __init__(
        self, encoders: _Encoders, specials: Mapping[str, Special], table: TokenTable, template: ChatTemplate | None
    ):
        super().__init__(specials, table, template, _frame(encoders.first))
        self._encoders = encoders

    def _encode_pieces(self, pieces: Sequence[str], *, at_start: bool) -> list[list[int]]:
        for piece in pieces:
            utf8(piece)
        cut = 1 if at_start else 0
        return _encode(self._encoders.first, pieces[:cut]) + _encode(self._encoders.inner, pieces[cut:])


def huggingface_tokenizer(path: Path, template: ChatTemplate | None) -> HuggingFaceTokenizer:
    """Read tokenizer.json. Raises ConfigError if it is invalid or of an unsupported kind."""
    try:
        # Raw: the vocabulary as Python objects would take more memory than the tokenizer itself.
        parts = msgspec.json.decode(path.read_bytes(), type=dict[str, msgspec.Raw])
        added = msgspec.json.decode(parts.get("added_tokens", b"[]"), type=list[_AddedToken])
        model = msgspec.json.decode(parts["model"], type=_Model)
        decoder = msgspec.json.decode(parts["decoder"])
    except (msgspec.MsgspecError, KeyError) as error:
        raise ConfigError(f"{path}: not a tokenizer: {error!r}") from error
    if model.type != "BPE":
        raise ConfigError(f"{path}: model.type is {model.type!r}; this worker reads BPE")
    piece_bytes = _piece_bytes(decoder, path)
    encoders = _encoders(parts | {"added_tokens": msgspec.Raw(b"[]")}, path)
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
    table = TokenTable(_token_bytes(encoders.first, specials, piece_bytes))
    return HuggingFaceTokenizer(encoders, specials, table, template)


def _encoders(parts: dict[str, msgspec.Raw], path: Path) -> _Encoders:
    first = _build(parts, path)
    pre = msgspec.json.decode(parts.get("pre_tokenizer", b"null"))
    # Only this scheme writes the beginning of a text otherwise than a piece further on.
    if b'"first"' not in bytes(parts.get("pre_tokenizer", b"")):
        return _Encoders(first, first)
    inner = {"pre_tokenizer": msgspec.Raw(msgspec.json.encode(_never_prepend(pre)))}
    return _Encoders(first, _build(parts | inner, path))


def _build(parts: dict[str, msgspec.Raw], path: Path) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_buffer(msgspec.json.encode(parts))
    except Exception as error:  # the library raises no other type
        raise ConfigError(f"{path}: the tokenizers library refuses it: {error}") from error


def _never_prepend(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            key: "never" if (key, entry) == ("prepend_scheme", "first") else _never_prepend(entry)
            for key, entry in value.items()
        }
    return [_never_prepend(entry) for entry in value] if isinstance(value, list) else value


def _encode(encoder: tokenizers.Tokenizer, pieces: Sequence[str]) -> list[list[int]]:
    """Encode with the interpreter's lock released, which only the library's batch calls do."""
    return [found.ids for found in encoder.encode_batch_fast(list(pieces), add_special_tokens=False)] if pieces else []


def _frame(encoder: tokenizers.Tokenizer) -> tuple[list[int], list[int]]:
    """Return the post-processor's tokens before and after a text."""
    plain = encoder.encode("a", add_special_tokens=False).ids
    framed = encoder.encode("a", add_special_tokens=True).ids
    for start in range(len(framed) - len(plain) + 1):
        if framed[start : start + len(plain)] == plain:
            return framed[:start], framed[start + len(plain) :]
    return [], []


def _token_bytes(
    encoder: tokenizers.Tokenizer, specials: Mapping[str, Special], piece_bytes: Callable[[str], bytes]
) -> Iterator[bytes]:
    """Yield the bytes of all ids in order; an id without a token has none."""
    added = {special.token_id: b"" if special.hidden else text.encode() for text, special in specials.items()}
    # The library counts tokens, not ids: where ids have gaps the last ones are beyond the count.
    ids = encoder.get_vocab(with_added_tokens=False).values()
    for token_id in range(max([*added, *ids], default=-1) + 1):
        piece = None if token_id in added else encoder.id_to_token(token_id)
        yield added.get(token_id, b"") if piece is None else piece_bytes(piece)


def _piece_bytes(decoder: Any, path: Path) -> Callable[[str], bytes]:
    """Return the function from a vocabulary entry to bytes for a tokenizer.json's `decoder`."""
    steps = decoder.get("decoders", [decoder]) if isinstance(decoder, dict) else []
    kinds = {step["type"] for step in steps}
    if kinds == {"ByteLevel"}:
        return _byte_level
    if kinds == {"Metaspace"} or (
        {"Replace", "ByteFallback"} <= kinds <= {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}
    ):
        return _sentence_piece if "ByteFallback" in kinds else _metaspace
    raise ConfigError(
        f"{path}: decoder is {'+'.join(sorted(kinds)) or decoder}; this worker reads ByteLevel, Metaspace, and "
        "Replace with ByteFallback"
    )


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


def _metaspace(piece: str) -> bytes:
    return piece.replace(_SPACE, " ").encode()


def _sentence_piece(piece: str) -> bytes:
    lone = _LONE_BYTE.match(piece)
    return bytes([int(lone[1], 16)]) if lone else _metaspace(piece)
