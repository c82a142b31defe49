"""An instance's profile as it crosses process boundaries: what a prefill costs there, and how large its cache is.

    GET /v1/profile
    {"model", "instance", "fingerprint", "state_bytes", "token_bytes",
     "prefill": {"fixed_seconds", "token_seconds", "squared_seconds", "samples", "max_tokens",
                 "relative_error"},
     "curve": [{"tokens", "prefill_seconds", "cache_bytes", "kv_bits_per_second"}]}

`curve` shows the figures at a few lengths, for people; programs read the rest. `prfaas.capacity.profile` holds the
formulas and fits the curve.
"""

from typing import Final

import msgspec

from prfaas.errors import ProtocolError

PATH: Final = "/v1/profile"


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


class Fitted(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a profile that is measured; the fields are a profile's."""

    fixed_seconds: float
    token_seconds: float
    squared_seconds: float
    samples: int
    max_tokens: int = 0
    relative_error: float = 0.0


class CurvePoint(msgspec.Struct, frozen=True, kw_only=True):
    """The figures at one length of prompt."""

    tokens: int
    prefill_seconds: float
    cache_bytes: int
    kv_bits_per_second: float


class ProfileAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """What GET /v1/profile answers. `fingerprint` names the weights; instances of others cannot share caches."""

    model: str
    fingerprint: str
    state_bytes: int
    token_bytes: int
    prefill: Fitted
    instance: str = ""
    curve: tuple[CurvePoint, ...] = ()

    @property
    def profile(self) -> Profile:
        """The figures alone."""
        return Profile(
            state_bytes=self.state_bytes, token_bytes=self.token_bytes, **msgspec.structs.asdict(self.prefill)
        )


def read_profile(document: bytes, url: str) -> ProfileAnswer:
    """Read what GET /v1/profile of the instance at `url` answered.

    Raises:
        ProtocolError: that is something else.

    """
    try:
        return msgspec.json.decode(document, type=ProfileAnswer)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ProtocolError(f"{url}{PATH} answers something else: {error}; is that a prfaas worker?") from error
