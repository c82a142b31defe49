"""The words of the long loop: the policy's rules, a proposal for one change of the pools, and how to tell of it.

What each kind of change is worth stands in `conversion` and `scaling`, what is done when in `longloop`.
"""

import math
from typing import Final, Literal

import msgspec

from prfaas.capacity.installation import Installation, Outlook, outlook

MIN_GAIN: Final = 0.1
"""A gain that is worth a change: profiles, lengths and steps are hardly known better than that."""


class Rules(msgspec.Struct, frozen=True, kw_only=True):
    """The policy's part."""

    converts: bool
    min_prefill: int
    min_decode: int
    conversion_cooldown_seconds: float
    scales: bool
    target_load: float
    scaling_cooldown_seconds: float
    ttft_seconds: float | None = None
    """Promised P90 of the time to the first token."""


class Proposal(msgspec.Struct, frozen=True, kw_only=True):
    """A change that is worth making: new replicas by pool."""

    kind: Literal["Converting", "Scaling"]
    changes: dict[str, int]
    why: str


def propose(
    kind: Literal["Converting", "Scaling"], installation: Installation, now: Outlook, changes: dict[str, int], why: str
) -> Proposal:
    """Return a proposal with the sentence that tells of it: what changes, why, and what that carries."""
    after = outlook(installation, {**installation.counts, **changes})
    moved = ", ".join(f"{name} {now.counts[name]} to {count}" for name, count in changes.items())
    figures = f"{now.lambda_max:.3g} to {after.lambda_max:.3g} requests/s, {now.arrivals_per_second:.3g} arrive"
    verb = "converts" if kind == "Converting" else "scales"
    return Proposal(kind=kind, changes=changes, why=f"{verb} {moved}, since {why}: {figures}")


def told(seen: Outlook) -> str:
    """Return what an outlook says, as a sentence."""
    loads = f"prefill is {percent(seen.prefill_load)} busy and decode {percent(seen.decode_load)}"
    return f"{seen.arrivals_per_second:.3g} requests/s arrive, {seen.lambda_max:.3g} can be served; {loads}"


def percent(share: float) -> str:
    """Return a load as people read it."""
    return f"{share:.0%}" if math.isfinite(share) else "hopelessly"


def gain(best: Outlook, now: Outlook) -> float:
    """Return by which share the best serves more; infinite where now nothing is served."""
    if best.lambda_max <= now.lambda_max:
        return 0.0
    return best.lambda_max / now.lambda_max - 1 if now.lambda_max > 0 else math.inf
