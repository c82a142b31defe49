"""How many tokens a request body holds, without a tokeniser: bytes divided by a running bytes-per-token ratio.

Tokenising 100 KB takes tens of milliseconds, and the answer is needed before a worker is chosen. Workers report the
exact count with every answer, so the ratio follows the model and its users. Sums of bytes and tokens, not a mean of
ratios: a long prompt, for which the decision matters, then weighs more than a short one, whose JSON frame distorts the
ratio.
"""

INITIAL_BYTES_PER_TOKEN = 4.0  # usual for text and code with vocabularies of 100 K and more
PRIOR_TOKENS = 64.0  # how much the initial ratio weighs: about one short request
DECAY = 0.98  # a request's weight halves after 34 others


class TokenEstimator:
    """The running ratio of one model."""

    def __init__(self) -> None:
        self._bytes = INITIAL_BYTES_PER_TOKEN * PRIOR_TOKENS
        self._tokens = PRIOR_TOKENS

    @property
    def bytes_per_token(self) -> float:
        """The present ratio."""
        return self._bytes / self._tokens

    def tokens(self, body_bytes: int) -> int:
        """Return the estimated prompt length of a body, rounded up."""
        return -int(-body_bytes // self.bytes_per_token)

    def observe(self, body_bytes: int, prompt_tokens: int) -> None:
        """Learn from a worker's exact count."""
        if prompt_tokens > 0:
            self._bytes = DECAY * self._bytes + body_bytes
            self._tokens = DECAY * self._tokens + prompt_tokens
