"""A byte tokenizer: ids 0..255 are bytes, the ids above are special tokens named in tokenizer_config.json."""

from collections.abc import Mapping, Sequence
from typing import Any

from prfaas_worker.tokenizer.base import Tokenizer
from prfaas_worker.tokenizer.specials import Special
from prfaas_worker.tokenizer.template import ChatTemplate
from prfaas_worker.tokenizer.utf8 import TokenTable, utf8

BYTE_TOKENS = 256


class ByteTokenizer(Tokenizer):
    """Text is its UTF-8 bytes; a plain prompt begins with `bos_id`."""

    def __init__(self, specials: Mapping[str, Special], bos_id: int | None, template: ChatTemplate | None):
        super().__init__(specials, TokenTable(bytes([byte]) for byte in range(BYTE_TOKENS)), template)
        self._bos = [] if bos_id is None else [bos_id]

    def _encode_pieces(self, pieces: Sequence[str], *, at_start: bool) -> list[list[int]]:
        del at_start
        return [list(utf8(piece)) for piece in pieces]

    def _frame(self, token_ids: list[int]) -> list[int]:
        return self._bos + token_ids


def byte_tokenizer(config: Mapping[str, Any], template: ChatTemplate | None) -> ByteTokenizer:
    """Build the tokenizer that tokenizer_config.json describes; what misses there raises KeyError and its like."""
    specials = {entry["content"]: Special(int(number)) for number, entry in config["added_tokens_decoder"].items()}
    bos_id = specials[config["bos_token"]].token_id if config.get("bos_token") else None
    return ByteTokenizer(specials, bos_id, template)
