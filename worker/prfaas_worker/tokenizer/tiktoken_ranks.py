"""tiktoken's rank files, as Kimi's models ship them: a line a token, its bytes in base64 and its rank.

The file knows neither the pattern that cuts text into words nor the special tokens. The pattern is `pat_str` of
tokenizer_config.json or, where that names Kimi's class without one, the pattern of that class. Special tokens are
`added_tokens_decoder`, and the reserved ids behind the ranks that it leaves out.
"""

import base64
import binascii
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import tiktoken

from prfaas.errors import ConfigError
from prfaas_worker.tokenizer.base import Tokenizer, TokenTable, utf8
from prfaas_worker.tokenizer.chat_template import ChatTemplate, Special

KIMI_CLASS: Final = "TikTokenTokenizer"
_ENDING: Final = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_UPPER: Final = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER: Final = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
KIMI_PATTERN: Final = "|".join(
    [
        r"[\p{Han}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_ENDING}",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_ENDING}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)
RESERVED_TOKENS: Final = 256
# Kimi's class cuts long text so before it asks tiktoken; equal token ids need equal cuts.
MOST_CHARACTERS: Final = 400_000
LONGEST_RUN: Final = 25_000
_RUNS: Final = re.compile(r"\s+|\S+")


class RanksTokenizer(Tokenizer):
    """A BPE of the `tiktoken` library, which releases the interpreter's lock while it encodes."""

    def __init__(
        self,
        encoding: tiktoken.Encoding,
        specials: Mapping[str, Special],
        table: TokenTable,
        template: ChatTemplate | None,
    ):
        super().__init__(specials, table, template)
        self._encoding = encoding

    def _encode_pieces(self, pieces: Sequence[str]) -> list[list[int]]:
        return [self._encode_piece(piece) for piece in pieces]

    def _encode_piece(self, piece: str) -> list[int]:
        utf8(piece)
        token_ids: list[int] = []
        for part in bounded_parts(piece):
            token_ids += self._encoding.encode_ordinary(part)
        return token_ids


def ranks_tokenizer(path: Path, config: Mapping[str, Any], template: ChatTemplate | None) -> RanksTokenizer:
    """Read tiktoken.model with tokenizer_config.json. Raises ConfigError if ranks or the pattern are unusable."""
    ranks = _read_ranks(path)
    pattern = config.get("pat_str") or (KIMI_PATTERN if config.get("tokenizer_class") == KIMI_CLASS else None)
    if pattern is None:
        raise ConfigError(
            f"{path}: the pattern that cuts text into words is not known; give tokenizer_config.json a pat_str, or the "
            f"tokenizer_class {KIMI_CLASS}"
        )
    specials = _specials(config, len(ranks))
    try:
        encoding = tiktoken.Encoding(path.name, pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
    except ValueError as error:
        raise ConfigError(f"{path}: tiktoken refuses the ranks or the pattern: {error}") from error
    return RanksTokenizer(encoding, specials, TokenTable(_token_bytes(ranks, specials)), template)


def bounded_parts(text: str) -> Iterator[str]:
    """Yield `text` in parts of at most MOST_CHARACTERS, without runs of spaces or of others above LONGEST_RUN."""
    for start in range(0, len(text), MOST_CHARACTERS):
        part = text[start : start + MOST_CHARACTERS]
        cut = 0
        for run in _RUNS.finditer(part) if len(part) > LONGEST_RUN else ():
            for end in range(run.start() + LONGEST_RUN, run.end(), LONGEST_RUN):
                yield part[cut:end]
                cut = end
        yield part[cut:]


def _read_ranks(path: Path) -> dict[bytes, int]:
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        if line:
            try:
                token, rank = line.split()
                ranks[base64.b64decode(token, validate=True)] = int(rank)
            except (ValueError, binascii.Error) as error:
                raise ConfigError(f"{path}, line {number}: want base64 and a rank: {error}") from error
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise ConfigError(f"{path}: the ranks of its {len(ranks)} tokens are not 0 to {len(ranks) - 1}")
    return ranks


def _specials(config: Mapping[str, Any], base: int) -> dict[str, Special]:
    """Return the named special tokens, and the reserved ones behind the ranks under the names of Kimi's class."""
    named = {int(number): entry for number, entry in config.get("added_tokens_decoder", {}).items()}
    specials = {
        f"<|reserved_token_{token_id}|>": Special(token_id)
        for token_id in range(base, base + RESERVED_TOKENS)
        if token_id not in named
    }
    for token_id, entry in named.items():
        specials[entry["content"]] = Special(
            token_id,
            hidden=bool(entry.get("special", True)),
            strips_left=bool(entry.get("lstrip")),
            strips_right=bool(entry.get("rstrip")),
        )
    return specials


def _token_bytes(ranks: Mapping[bytes, int], specials: Mapping[str, Special]) -> list[bytes]:
    last = max([*ranks.values(), *(special.token_id for special in specials.values())])
    tokens = [b""] * (last + 1)
    for token, rank in ranks.items():
        tokens[rank] = token
    for text, special in specials.items():
        tokens[special.token_id] = b"" if special.hidden else text.encode()
    return tokens
