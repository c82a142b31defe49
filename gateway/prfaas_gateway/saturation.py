"""Which decode instances are full, as the gateway can know it: from its own requests there and their refusals.

A worker that has no place left says so (503). At that moment the gateway learns how many requests of its own stand
there, and sends no more than that until one of them ends or a moment has passed: with several gateways the places may
by then be another's. While every instance is full, requests are answered at once and cost the workers nothing.
"""

from collections.abc import Mapping, Set
from typing import Final, NamedTuple

from msgspec.structs import replace

from prfaas.routing.facts import Facts
from prfaas_gateway.openai import SaturatedError

BELIEVED_SECONDS: Final = 0.5


class _Full(NamedTuple):
    in_flight: int
    until_seconds: float


class Saturation:
    """What full instances have said, each for a moment."""

    def __init__(self) -> None:
        self._said: dict[str, _Full] = {}

    def refused(self, name: str, in_flight: int, now_seconds: float) -> None:
        """An instance has no place for another request while so many of ours are there."""
        self._said[name] = _Full(in_flight, now_seconds + BELIEVED_SECONDS)

    def full(self, in_flight: Mapping[str, int], now_seconds: float) -> Set[str]:
        """Return the instances that are full; what is believed no longer is forgotten."""
        if not self._said:
            return frozenset()
        self._said = {name: said for name, said in self._said.items() if now_seconds < said.until_seconds}
        return {name for name, said in self._said.items() if in_flight.get(name, 0) >= said.in_flight}


def avoiding(facts: Facts, full: Set[str]) -> Facts:
    """Return facts by which no full instance is chosen.

    Raises:
        SaturatedError: every decode instance that lives is full.

    """
    ejected = facts.ejected_until_seconds
    living = [
        one.name
        for one in facts.table.instances
        if one.role == "decode"
        and one.state == "Ready"
        and ejected.get(one.name, facts.now_seconds) <= facts.now_seconds
    ]
    if living and full >= set(living):
        raise SaturatedError(f"all {len(living)} decode instances are full; try again in a moment")
    return replace(facts, tried=facts.tried | full)
