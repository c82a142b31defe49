"""A client's preferences for one request: datacenters, offload, a deadline; carried as three headers.

    x-prfaas-datacenters: prefer eu-west, eu-north; forbid us
    x-prfaas-offload: auto | never | always
    x-prfaas-deadline-seconds: 2.5

Preferences narrow the policy's permissions and never widen them (prfaas.routing.facts.narrow). A malformed header is
refused, because an ignored misspelt `forbid` would send a prompt to a forbidden place; so is the name of a place where
no cluster is. Header and policy name places by one rule, `covers`.
"""

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Final, Literal, get_args

import msgspec

from prfaas.errors import RequestError
from prfaas.wire.headers import DATACENTERS, DEADLINE_SECONDS, OFFLOAD

Offload = Literal["auto", "never", "always"]

MAX_NAMES: Final = 32
"""Names in one clause, as many as a policy may list."""
MIN_DEADLINE_SECONDS: Final = 0.001
MAX_DEADLINE_SECONDS: Final = 86_400
_MAX_CHARACTERS: Final = 4096
_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?")
_SECONDS = re.compile(r"[0-9]{1,5}(?:\.[0-9]{1,20})?")
_FORM: Final = "want `prefer NAME, NAME; forbid NAME`, or only one part, with names as in the clusters' `datacenter`"


class Preferences(msgspec.Struct, frozen=True):
    """A client's preferences for the prefill of one request.

    A name covers the datacenter of that name and those within it: `us` covers us and us-east-1, but not usa.
    """

    prefer: tuple[str, ...] = ()
    forbid: tuple[str, ...] = ()
    offload: Offload = "auto"


NO_PREFERENCES: Final = Preferences()


def covers(name: str, datacenter: str) -> bool:
    """Return true if a name in a preference or a policy means this datacenter, in upper or lower case."""
    name, datacenter = name.casefold(), datacenter.casefold()
    return datacenter == name or datacenter.startswith(f"{name}-")


def overlap(name: str, datacenter: str) -> bool:
    """Return true if one of two places lies in the other: a cluster in `us` may be in us-east-1."""
    name, datacenter = name.casefold(), datacenter.casefold()
    return name == datacenter or name.startswith(f"{datacenter}-") or datacenter.startswith(f"{name}-")


def forbids(names: Collection[str], datacenter: str) -> bool:
    """Return true if a prompt for which these names are forbidden may not reach a datacenter.

    A place that nobody named (an empty `datacenter`) may be any of them, and so is forbidden with each.
    """
    return bool(names) and (not datacenter or any(overlap(name, datacenter) for name in names))


def unknown_places(names: Iterable[str], datacenters: Collection[str]) -> list[str]:
    """Return the names that mean none of the datacenters: misspelt ones forbid nothing."""
    return [name for name in names if not any(overlap(name, one) for one in datacenters)]


def check_known(forbid: Iterable[str], datacenters: Collection[str]) -> None:
    """Raise RequestError (400) if a request forbids a place that is none of the datacenters."""
    if unknown := unknown_places(forbid, datacenters):
        known = ", ".join(sorted(set(datacenters)))
        raise _refused(DATACENTERS, f"forbids {unknown[0]!r}, where no cluster is; the places are: {known}")


def read_preferences(headers: Mapping[str, str]) -> Preferences:
    """Return the preferences in headers, by lower-case names; raises RequestError (400) for a malformed header."""
    places, offload = headers.get(DATACENTERS), headers.get(OFFLOAD)
    if places is None and offload is None:
        return NO_PREFERENCES
    prefer, forbid = ((), ()) if places is None else read_datacenters(places)
    return Preferences(prefer, forbid, "auto" if offload is None else read_offload(offload))


def read_datacenters(text: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names to prefer, best first, and those to forbid; raises RequestError (400) for a malformed text."""
    if len(text) > _MAX_CHARACTERS:
        raise _refused(DATACENTERS, f"has {len(text)} characters; at most {_MAX_CHARACTERS} are read")
    clauses: dict[str, tuple[str, ...]] = {}
    for clause in text.split(";"):
        verb, _, names = clause.strip().partition(" ")
        if verb not in ("prefer", "forbid") or verb in clauses:
            raise _refused(DATACENTERS, f"is {text!r}; {_FORM}")
        clauses[verb] = tuple(name.strip() for name in names.split(","))
    prefer, forbid = clauses.get("prefer", ()), clauses.get("forbid", ())
    check_datacenters(prefer, forbid)
    return prefer, forbid


def check_datacenters(prefer: Iterable[str], forbid: Iterable[str]) -> None:
    """Raise RequestError unless these are valid names, few enough, and none is both preferred and forbidden."""
    for names in (list(prefer), list(forbid)):
        wrong = next((name for name in names if not _NAME.fullmatch(name)), None)
        if wrong is not None:
            raise _refused(DATACENTERS, f"names {wrong!r}; {_FORM}")
        if len(names) > MAX_NAMES:
            raise _refused(DATACENTERS, f"has {len(names)} names in one part; at most {MAX_NAMES} are read")
    for name in prefer:
        if any(covers(other, name) for other in forbid):
            raise _refused(DATACENTERS, f"prefers {name!r}, which it forbids as well; remove it from one")


def write_datacenters(prefer: Iterable[str], forbid: Iterable[str]) -> str:
    """Return the header's value; empty for no names."""
    parts = {"prefer": ", ".join(prefer), "forbid": ", ".join(forbid)}
    return "; ".join(f"{verb} {names}" for verb, names in parts.items() if names)


def read_offload(text: str) -> Offload:
    """Return the preference about offloading; raises RequestError."""
    for known in get_args(Offload):
        if text == known:
            return known
    raise _refused(OFFLOAD, f"is {text[:64]!r}; want auto, never or always")


def read_deadline_seconds(text: str) -> float:
    """Return the request's deadline in seconds; raises RequestError."""
    seconds = float(text) if _SECONDS.fullmatch(text) else 0.0
    if not MIN_DEADLINE_SECONDS <= seconds <= MAX_DEADLINE_SECONDS:
        form = f"want seconds from {MIN_DEADLINE_SECONDS} to {MAX_DEADLINE_SECONDS}, such as 2.5"
        raise _refused(DEADLINE_SECONDS, f"is {text[:64]!r}; {form}")
    return seconds


def _refused(header: str, message: str) -> RequestError:
    return RequestError(f"the header {header} {message}", code="invalid_header", param=header)
