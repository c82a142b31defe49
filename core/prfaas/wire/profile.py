"""An instance's profile between processes: the time of a prefill there, and the size of its cache.

A `ProfileAnswer` answers GET /v1/profile. Its `curve` shows the figures at a few lengths, for people; programs read the
rest. `prfaas.capacity.profile` holds the formulas and fits the curve.
"""

from typing import Final

import msgspec

from prfaas.util import decode_json

PATH: Final = "/v1/profile"


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """One instance's curves. Seconds of a prefill of n tokens after s cached ones:

        fixed_seconds + token_seconds * n + squared_seconds * ((s + n)^2 - s^2)

    and bytes of a cache of n tokens: state_bytes + token_bytes * n. The curve is fitted to `samples` prefills of at
    most `max_tokens` tokens; their mean relative error is `relative_error`. Beyond twice that length the curve is a
    guess. With no samples its seconds are 0 and mean nothing.
    """

    state_bytes: int
    token_bytes: int
    fixed_seconds: float = 0.0
    token_seconds: float = 0.0
    squared_seconds: float = 0.0
    samples: int = 0
    max_tokens: int = 0
    relative_error: float = 0.0


class PoolProfile(msgspec.Struct, frozen=True, kw_only=True):
    """The profile of a pool's instances. As a seed it may lack a part.

    No samples: its seconds are not known. No bytes at all: the size of a cache is not known.
    """

    cluster: str
    pool: str
    profile: Profile


class Fitted(msgspec.Struct, frozen=True, kw_only=True):
    """The measured part of a profile, with a profile's fields."""

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
    """The answer of GET /v1/profile. `fingerprint` names the weights; instances of others cannot share caches. An
    instance whose computing is `emulated` names the profile that its time follows; these are its own figures, as
    stretched and scaled."""

    model: str
    fingerprint: str
    state_bytes: int
    token_bytes: int
    prefill: Fitted
    instance: str = ""
    curve: tuple[CurvePoint, ...] = ()
    emulated: str = ""

    @property
    def profile(self) -> Profile:
        """The figures only."""
        return Profile(
            state_bytes=self.state_bytes, token_bytes=self.token_bytes, **msgspec.structs.asdict(self.prefill)
        )


def read_profile(document: bytes, url: str) -> ProfileAnswer:
    """Read the answer of GET /v1/profile of the instance at `url`; raises ProtocolError for something else."""
    return decode_json(document, ProfileAnswer, f"{url}{PATH} answers something else", "; is that a prfaas worker?")
