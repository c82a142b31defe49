"""The long timescale: when load and capacity drift apart, which one change of the pools to make, and when to rest.

Two kinds of change. A *conversion* moves instances that two pools share from one role to the other, towards the split
that carries most, equation (8). A change *in number* adds instances to the stage that is too busy, or takes one away.
What makes this hard is resting:

- everything is measured, so a gain below a tenth is noise; and after one change follows none for a cooldown, in which
  the short loop finds its new threshold and the measurements leave the old state behind
- a conversion never crosses the best split, and none is made that would break a promised time to the first token, so
  that facts that stay the same lead to a state in which nothing is wanted, and never back
- old, missing and thin facts, and pools that have not become what was last asked of them, mean: hold.

No clock and no I/O: facts in, at most one change out, with its reason. Bounds and owners of a pool are facts like any.
"""

import math
from typing import Literal

import msgspec

from prfaas.capacity.changes import Proposal, Rules, gain, percent, told
from prfaas.capacity.conversion import best_split, conversion
from prfaas.capacity.installation import Installation, Outlook, Pool, outlook, ttft_p90_seconds
from prfaas.capacity.scaling import scaled, wake, when_idle

__all__ = ["Decision", "Moment", "Rules", "decide"]


class Moment(msgspec.Struct, frozen=True, kw_only=True):
    """How the installation stands at this time."""

    arrivals_per_second: float | None = None
    """None: not known."""
    waiting_prefills: int = 0
    since_change_seconds: float = math.inf
    stale: str = ""
    """Why nothing that was measured counts, as a sentence; empty: it does."""
    unknown: str = ""
    """What is not known well enough to plan with, as a sentence."""
    under_way: str = ""
    """Which change or trouble of the pools has not ended, as a sentence."""
    ours: bool = False
    """Whether what is under way is our own last change."""


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """What to do, what the condition Balanced says, and the figures behind it."""

    status: Literal["True", "False", "Unknown"]
    reason: str
    message: str
    changes: dict[str, int] = {}
    """New replicas by pool; empty: none."""
    now: Outlook | None = None
    """None: not known."""
    best: Outlook | None = None
    """With as many instances as there are, divided anew."""


def decide(rules: Rules, installation: Installation, moment: Moment) -> Decision:
    """Return the one change to make now, or why none is made."""
    if moment.stale:
        return Decision(status="Unknown", reason="MetricsStale", message=f"{moment.stale}: nothing is changed")
    if (moment.arrivals_per_second or moment.waiting_prefills) and (woken := wake(rules, installation)):
        return _made(woken)  # without a cooldown: they wait
    now = best = None
    if not moment.unknown:
        now = outlook(installation, installation.counts)
        best = best_split(rules, installation, now)
    if moment.under_way:
        reason = "Converting" if moment.ours else "PoolsNotSettled"
        figures = f" ({told(now)})" if now else ""
        message = f"{moment.under_way}: nothing else is changed before that{figures}"
        return Decision(status="False", reason=reason, message=message, now=now, best=best)
    if moment.arrivals_per_second == 0:
        wanted = when_idle(rules, installation)
    elif now is None or best is None:
        return Decision(status="Unknown", reason="NotMeasured", message=f"{moment.unknown}: nothing is changed")
    else:
        wanted = conversion(rules, installation, now, best) or scaled(rules, installation, now)
    if wanted is not None:
        return _if_allowed(rules, installation, moment, wanted, _made(wanted, now, best))
    return _resting(rules, installation, now, best)


def _made(made: Proposal, now: Outlook | None = None, best: Outlook | None = None) -> Decision:
    return Decision(status="False", reason=made.kind, message=made.why, changes=made.changes, now=now, best=best)


def _if_allowed(
    rules: Rules, installation: Installation, moment: Moment, wanted: Proposal, decision: Decision
) -> Decision:
    """Return the decision, without its change where a pool is not ours to write or the cooldown is not over."""
    refusals = [pool.refusal for pool in installation.pools if pool.name in wanted.changes and pool.refusal]
    if refusals:
        message = f"not done: {wanted.why}; {refusals[0]}"
        return msgspec.structs.replace(decision, reason="ReplicasNotOwned", message=message, changes={})
    converting = wanted.kind == "Converting"
    cooldown_seconds = rules.conversion_cooldown_seconds if converting else rules.scaling_cooldown_seconds
    if moment.since_change_seconds < cooldown_seconds:
        message = f"{cooldown_seconds:.0f} s after the last change: {wanted.why}"
        return msgspec.structs.replace(decision, reason="Cooldown", message=message, changes={})
    return decision


def _resting(rules: Rules, installation: Installation, now: Outlook | None, best: Outlook | None) -> Decision:
    """Return the decision to change nothing, and whether that is well."""
    if now is None or best is None:
        return Decision(status="True", reason="Balanced", message="no request comes", now=now, best=best)
    seen = told(now)
    if trouble := _trouble(rules, installation, now):
        reason, why = trouble
        return Decision(status="False", reason=reason, message=f"{seen}; {why}", now=now, best=best)
    more = gain(best, now)
    other = f"; N_p {installation.hub_prefill(best.counts)} would serve {percent(more)} more" if more > 0 else ""
    return Decision(status="True", reason="Balanced", message=f"{seen}{other}", now=now, best=best)


def _trouble(rules: Rules, installation: Installation, now: Outlook) -> tuple[str, str] | None:
    """Return the reason and a sentence, where no change that may be made would help."""
    kept = "; ".join(f"{pool.name}: {_kept_by(pool)}" for pool in installation.pools)
    if rules.scales and now.busiest > rules.target_load:
        return "AtBounds", f"that is above {rules.target_load:.0%}, and no pool may grow that would help ({kept})"
    if now.busiest >= 1:
        return "Overloaded", "no conversion helps: add instances, or set scaling.mode to Auto"
    if rules.ttft_seconds is not None:
        expected = ttft_p90_seconds(installation, now)
        if expected > rules.ttft_seconds:
            return (
                "SloNotKept",
                f"P90 of the first token is {expected:.3g} s where {rules.ttft_seconds:.3g} s are promised",
            )
    return None


def _kept_by(pool: Pool) -> str:
    if pool.refusal:
        return pool.refusal
    return "has no maxReplicas" if pool.most is None else f"{pool.replicas} of at most {pool.most}"
