"""Prompts of so many tokens, none of which was ever sent: random words, as ids of the engine's own tokens.

An engine that gives no ids of its tokens gets text, whose length in tokens is only near what was asked for. Then no
prompt ends exactly at a block's edge.
"""

import random
from typing import Final, TypeAlias

from prfaas.cli.contract.calls import CheckedEngine

DrawnPrompt: TypeAlias = list[int] | str

_PIECE_TOKENS: Final = 8
_POOL_WORDS: Final = 1500
_CHARACTERS_A_TOKEN: Final = 4
_TEXT: Final = """
river stone seven market yellow train letter winter garden copper bridge answer silver mother engine window
twelve doctor island summer paper orange number church pencil valley king simple travel music forty glass
village empty soldier bread storm corner hammer question lemon second forest captain mirror north salt
kitchen promise thunder blue wagon eleven teacher heavy cotton harbor final planet rabbit ticket August
machine gentle nine colour signal metal butter early palace shadow Monday circle desert quick apple police
"""


class Prompts:
    """Draws prompts for an engine."""

    def __init__(self, engine: CheckedEngine):
        self._random = random.Random()  # noqa: S311  # guards nothing
        text = self._text(_POOL_WORDS)
        limit = max(64, engine.context_tokens // 2)
        answer = engine.ask(prompt=text[: limit * 2], max_tokens=1, return_token_ids=True)
        self._pool = answer.ids[0] if answer.choice else []
        tokens = answer.usage.get("prompt_tokens") or 0
        self._characters = len(text[: limit * 2]) / tokens if tokens else _CHARACTERS_A_TOKEN

    @property
    def are_exact(self) -> bool:
        """Whether prompts have exactly as many tokens as asked for."""
        return len(self._pool) > _PIECE_TOKENS

    def draw(self, tokens: int) -> DrawnPrompt:
        """Return another prompt each time."""
        if not self.are_exact:
            return self._text(tokens)[: max(1, round(tokens * self._characters))]
        return self.ids(tokens)

    def change(self, prompt: DrawnPrompt, start: float, tokens: int) -> DrawnPrompt:
        """Return a prompt with other tokens from `start` on, a share of its length."""
        if isinstance(prompt, str):
            first, count = int(len(prompt) * start), max(1, round(tokens * self._characters))
            other = self._text(tokens)[:count]
            return prompt[:first] + other[: len(prompt) - first] + prompt[first + count :]
        first = int(len(prompt) * start)
        return prompt[:first] + self.ids(tokens)[: len(prompt) - first] + prompt[first + tokens :]

    def ids(self, tokens: int) -> list[int]:
        """Return a prompt in token ids; only where prompts are exact."""
        ids: list[int] = []
        while len(ids) < tokens:
            start = self._random.randrange(len(self._pool) - _PIECE_TOKENS)
            ids += self._pool[start : start + _PIECE_TOKENS]
        return ids[:tokens]

    def _text(self, words: int) -> str:
        return " ".join(self._random.choices(_TEXT.split(), k=words))
