"""What every tokenizer does: text to token ids and back. The three kinds differ in how a piece of text is encoded."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

from prfaas.errors import RequestError
from prfaas_worker.tokenizer.specials import Special, Specials
from prfaas_worker.tokenizer.template import ChatTemplate, Conversation
from prfaas_worker.tokenizer.utf8 import TokenTable


class Tokenizer(ABC):
    """The tokenizer of one model directory. Safe to use from several threads.

    Args:
        specials: the special tokens by their letters.
        table: the bytes of every token in text; a hidden special token has none.
        template: how conversations are written, None for a model that knows none.

    """

    def __init__(self, specials: Mapping[str, Special], table: TokenTable, template: ChatTemplate | None):
        self._specials = Specials(specials)
        self._texts = {special.token_id: text for text, special in specials.items()}
        self._table = table
        self._template = template
        self.token_bytes = table.__getitem__
        """What a token id adds to the text: a hidden special token, or an id beyond the table, adds nothing."""

    @abstractmethod
    def _encode_pieces(self, pieces: Sequence[str], *, at_start: bool) -> list[list[int]]:
        """Token ids of each piece, letters being letters; `at_start`: nothing stands before the first one."""

    @abstractmethod
    def _frame(self, token_ids: list[int]) -> list[int]:
        """Put around a plain prompt what the model wants there, such as a beginning token."""

    @property
    def specials(self) -> Mapping[str, int]:
        """Ids of the special tokens by their letters."""
        return {text: special.token_id for text, special in self._specials.by_text.items()}

    @property
    def template_source(self) -> str:
        """Text of the chat template, empty without one."""
        return self._template.source if self._template else ""

    def encode(self, text: str, *, framed: bool = True) -> list[int]:
        """Token ids of a plain prompt; `framed` with the special tokens that the model wants around it.

        Raises:
            RequestError: the text has half of a surrogate pair.

        """
        token_ids = self._token_ids(self._specials.split_plain(text))
        return self._frame(token_ids) if framed else token_ids

    def encode_chat(self, conversation: Conversation) -> list[int]:
        """Token ids of a conversation, up to where the assistant's answer begins or goes on.

        Raises:
            RequestError: the template refuses the messages, or the model has none.

        """
        if self._template is None:
            raise RequestError("this model has no chat template; use /v1/completions", param="messages")
        return self._token_ids(self._specials.split(self._template.render(conversation, self._specials.guard)))

    def _token_ids(self, parts: Sequence[str | int]) -> list[int]:
        at_start = bool(parts) and isinstance(parts[0], str)
        encoded = iter(self._encode_pieces([part for part in parts if isinstance(part, str)], at_start=at_start))
        token_ids: list[int] = []
        for part in parts:
            if isinstance(part, int):
                token_ids.append(part)
            else:
                token_ids += next(encoded)
        return token_ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of a whole prompt, special tokens written out, damaged characters as U+FFFD."""
        texts = self._texts
        parts = (texts[token].encode() if token in texts else self.token_bytes(token) for token in token_ids)
        return b"".join(parts).decode("utf-8", "replace")
