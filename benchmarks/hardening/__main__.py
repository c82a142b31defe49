"""What strangers, hostile clusters, bad inputs, overload and new certificates do to gateway, worker and operator.

    prfaas bench hardening [flood] [fuzz] [members] [keys] [overload] [identities] [rotation]

Each part drives real processes on loopback; all together take about eight minutes:

    flood       half-sent heads, and packed and plain bodies that are held back, beside good clients of a gateway
    fuzz        100,000 inputs made to crash: chat templates, texts, JSON bodies, heads, event streams
    members     an operator whose new members' API servers send 400 MiB in 400 KiB, pages without end, or elsewhere
    keys        CPU of a gateway with keys, isolated caches, budgets and caps, of one without, in turns
    overload    two and five times the requests that an engine carries
    identities  CPU of a gateway inside TLS, of one that asks nobody's identity, in turns
    rotation    all certificates replaced six times under load
"""

from collections.abc import Callable, Iterator
from typing import Annotated, Final

import typer
from benchmarks.hardening.fuzz import crashed
from benchmarks.hardening.gateway import flooded, with_keys
from benchmarks.hardening.identities import identified
from benchmarks.hardening.members import faced
from benchmarks.hardening.overload import overloaded
from benchmarks.hardening.rotation import rotated
from benchmarks.report import Figure, run, say

from prfaas.errors import ConfigError

PARTS: Final[dict[str, Callable[[], Iterator[Figure]]]] = {
    "flood": flooded,
    "fuzz": crashed,
    "members": faced,
    "keys": with_keys,
    "overload": overloaded,
    "identities": identified,
    "rotation": rotated,
}
Chosen = Annotated[list[str] | None, typer.Argument(help=f"Some of {', '.join(PARTS)}; all when left out.")]


def figures(parts: Chosen = None) -> Iterator[Figure]:
    if unknown := set(parts or ()) - set(PARTS):
        raise ConfigError(f"no part is called {min(unknown)}: want some of {', '.join(PARTS)}")
    for name in parts or PARTS:
        say(f"{name}: begins")
        yield from PARTS[name]()


if __name__ == "__main__":
    run("hardening", __doc__, figures)
