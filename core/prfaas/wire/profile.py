"""An instance's profile as it crosses process boundaries: what a prefill costs there, and how large its cache is.

`prfaas.capacity.profile` holds the formulas and fits the curve; here are only the figures.
"""

import msgspec


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """One instance's curves. Seconds of a prefill of n tokens behind s cached ones:

        fixed_seconds + token_seconds * n + squared_seconds * ((s + n)^2 - s^2)

    and bytes of a cache of n tokens: state_bytes + token_bytes * n. Behind the curve are `samples` prefills of at most
    `max_tokens` tokens, which they differ from by `relative_error` of their time in the mean; beyond twice that length
    the curve is a guess. With no samples its seconds are 0 and mean nothing.
    """

    state_bytes: int
    token_bytes: int
    fixed_seconds: float = 0.0
    token_seconds: float = 0.0
    squared_seconds: float = 0.0
    samples: int = 0
    max_tokens: int = 0
    relative_error: float = 0.0
