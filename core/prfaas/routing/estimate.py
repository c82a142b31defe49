"""Estimates a prompt's tokens from its size, by ratios that one client's prompts teach.

Tokenising 100 KB takes tens of milliseconds, too long before a decision. Engines report exact lengths, so the ratios
follow the model and its users. A prompt has units of many kinds and one exact length. This length is divided among the
kinds as the estimate was, and each kind's ratio is its sum of tokens by its sum of units: long prompts weigh more than
short ones, and what a prompt does not have it does not change.

An observation is bounded twice. It counts for a ninth of a ratio at most, once there is enough to learn from; and a
ratio stays within what is possible for its kind. Clients share no estimator, so no client moves another's estimate.
"""

import math
from operator import mul
from typing import Final, NamedTuple

from prfaas.routing.prompt_size import PromptSize, Unit

PRIOR_TOKENS: Final = 32.0
"""How much the first ratio weighs: about a short request."""
MEMORY_TOKENS: Final = 65_536.0
"""How many tokens of a kind are remembered; more make older ones fade."""
LONGEST: Final = 1 / 8
"""The longest observation, as a part of that memory."""


class Ratio(NamedTuple):
    """Tokens a unit: the least and the most that are possible, and what is usual for text models."""

    least: float
    usual: float
    most: float


RATIOS: Final = {
    # A token has one byte at least, and sixteen letters are a long word.
    Unit.LETTER: Ratio(1 / 16, 0.22, 1.0),
    Unit.SPACE: Ratio(1 / 32, 0.1, 1.0),
    Unit.MARK: Ratio(1 / 16, 0.1, 1.0),
    Unit.MARK_RUN: Ratio(1 / 8, 0.9, 2.0),
    Unit.DIGIT: Ratio(1 / 8, 0.9, 1.0),
    Unit.LATIN: Ratio(1 / 8, 0.7, 2.0),
    Unit.ALPHABET: Ratio(1 / 8, 0.4, 2.0),
    Unit.CJK: Ratio(1 / 4, 0.9, 3.0),
    Unit.OTHER: Ratio(1 / 8, 1.2, 4.0),
    Unit.TOKEN: Ratio(1.0, 1.0, 1.0),
    Unit.MESSAGE: Ratio(1 / 8, 4.0, 64.0),
    # Almost nothing where the template leaves them out.
    Unit.TOOL_BYTE: Ratio(1 / 4096, 0.25, 1.0),
    Unit.DOCUMENT_BYTE: Ratio(1 / 4096, 0.25, 1.0),
    Unit.MEDIUM: Ratio(1.0, 64.0, 16_384.0),
}
_RATIOS: Final = tuple(RATIOS[unit] for unit in Unit)
_MEMORY: Final = tuple(MEMORY_TOKENS / ratio.usual for ratio in _RATIOS)
"""How many units of each kind are remembered."""
_PARTS: Final = tuple(1 / units for units in _MEMORY)
"""What one unit is of them."""


class TokenEstimator:
    """The ratios of one client's prompts."""

    def __init__(self) -> None:
        self._ratios = [ratio.usual for ratio in _RATIOS]
        self._units = [PRIOR_TOKENS / ratio.usual for ratio in _RATIOS]

    def tokens(self, size: PromptSize) -> int:
        """Return the estimated length of a prompt."""
        tokens = math.ceil(sum(map(mul, size.counts, self._ratios)))
        return tokens if size.most_tokens is None else min(tokens, size.most_tokens)

    def observe(self, size: PromptSize, exact_tokens: int) -> None:
        """Learn from the exact length of a prompt."""
        estimated_tokens = sum(map(mul, size.counts, self._ratios))
        if exact_tokens <= 0 or not estimated_tokens or size.most_tokens is not None or not size.is_whole:
            return
        error = exact_tokens / estimated_tokens
        weight = min(1.0, LONGEST / max(map(mul, size.counts, _PARTS)))
        for unit, count in enumerate(size.counts):
            if not count:
                continue
            (least, _, most), ratio = _RATIOS[unit], self._ratios[unit]
            before, new = self._units[unit], weight * count
            # Its share of the exact length, divided as the estimate is, gives it this ratio.
            taught = error * ratio
            taught = (
                least if taught < least else most if taught > most else taught
            )  # `min` and `max` cost twice as much
            self._ratios[unit] = (before * ratio + new * taught) / (before + new)
            self._units[unit] = min(before + new, _MEMORY[unit])
