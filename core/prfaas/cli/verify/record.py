"""The record of a verification: what was verified, step by step, and the verdict. It names no address and no key, so
that it can be sent to others; docs/use/verify.md has a table of such records.
"""

from collections.abc import Sequence
from typing import Final, Literal

import msgspec

from prfaas.cli.page import make_table, wrap_page
from prfaas.cli.verify.kit import VerifyFigures

StepOutcome = Literal["holds", "fails", "proves little", "left out"]
VerifyVerdict = Literal["proven", "undecided", "not proven"]

_ORDER: Final[tuple[StepOutcome, ...]] = ("fails", "proves little", "left out", "holds")
_SENTENCES: Final[dict[VerifyVerdict, str]] = {
    "proven": "Requests that these engines hand over are answered as by one engine.",
    "undecided": "Nothing wrong was seen, but what was seen proves too little.",
    "not proven": "Requests that these engines hand over are not answered as by one engine.",
}


class VerifiedStep(msgspec.Struct, frozen=True):
    """What a step found. One that does not apply to these engines is left out, with the reason; it is `due` where it
    does apply, and time did not suffice."""

    claim: str
    outcome: StepOutcome
    seen: str
    seconds: float
    is_due: bool = False


class EngineSaid(msgspec.Struct, frozen=True):
    """What an engine says of itself."""

    role: Literal["prefill", "decode", "reference", "gateway"]
    label: str
    model: str


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """A verification as a whole. `device` and `link` are in the words of who ran it."""

    format: Literal[1] = 1
    prfaas: str
    day: str
    way: str
    engines: list[EngineSaid]
    device: str
    link: str
    verdict: VerifyVerdict
    seconds: float
    figures: VerifyFigures
    steps: list[VerifiedStep]


def verdict_of(steps: Sequence[VerifiedStep]) -> VerifyVerdict:
    """Return the verdict: every step that applies must hold."""
    outcomes = {one.outcome for one in steps}
    if "fails" in outcomes:
        return "not proven"
    is_whole = not any(one.is_due for one in steps) and "proves little" not in outcomes
    return "proven" if is_whole and "holds" in outcomes else "undecided"


def page_of(record: Record) -> str:
    """Return a record as a page of HTML that loads nothing."""
    said = [(one.role, one.label, one.model) for one in record.engines]
    facts = [
        ("way", record.way),
        ("device", record.device or "not given"),
        ("link", record.link or "not given"),
        ("verified by", f"prfaas {record.prfaas}, on {record.day}, in {record.seconds:.0f} s"),
    ]
    figures = [(name, f"{value:.4g}") for name, value in msgspec.to_builtins(record.figures).items()]
    # What holds is last.
    ordered = sorted(record.steps, key=lambda one: _ORDER.index(one.outcome))
    steps = [(one.outcome, one.claim, one.seen) for one in ordered]
    return wrap_page(
        f"prfaas verify: {record.verdict}",
        f'<p class="verdict">{_SENTENCES[record.verdict]}</p>',
        "<h2>What was verified</h2>",
        make_table(("engine", "says that it is", "model"), said, are_words=True),
        make_table(("what", "value"), facts, are_words=True),
        "<h2>Steps</h2>",
        make_table(("outcome", "claim", "seen"), steps, are_words=True),
        "<h2>Figures</h2>",
        make_table(("what", "value"), figures, are_words=True),
    )
