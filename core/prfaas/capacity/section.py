"""Reads the fields of a file that people write: each with its kind, and a message that names field, value and fix.

A reader takes the fields of its `Section` one by one; the rest are errors. A number with its unit is answered with the
number to write, a share with a percent sign with the fraction, an unknown field with the field probably meant.
"""

import difflib
import math
import re
from collections.abc import Callable, Iterable
from typing import Any, Final, TypeVar, cast

from prfaas.errors import ConfigError

T = TypeVar("T")
_REQUIRED: Final = object()
_WITH_UNIT: Final = re.compile(r"\s*([0-9.]+(?:[eE][-+]?[0-9]+)?)\s*([A-Za-z]+(?:/s|ps)?)\s*")
_PERCENT: Final = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?)\s*%\s*")
# By the end of the field's name: its unit in words, and the factors of other units.
_UNITS: Final[dict[str, tuple[str, dict[str, float]]]] = {
    "Mbps": (
        "Mbit/s",
        {
            **dict.fromkeys(("Mbit/s", "Mbps", "Mb/s"), 1.0),
            **dict.fromkeys(("Gbit/s", "Gbps", "Gb/s"), 1e3),
            **dict.fromkeys(("Tbit/s", "Tbps", "Tb/s"), 1e6),
            **dict.fromkeys(("MB/s", "MBps"), 8.0),
            **dict.fromkeys(("GB/s", "GBps"), 8e3),
            "MiB/s": 8.388608,
            "GiB/s": 8589.934592,
        },
    ),
    "Mib": ("MiB", {"MiB": 1.0, "GiB": 1024.0, "KiB": 1 / 1024, "MB": 1e6 / 2**20, "GB": 1e9 / 2**20}),
    "Bytes": ("bytes", {"B": 1.0, "KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30, "KB": 1e3, "MB": 1e6, "GB": 1e9}),
    "Gb": ("GB", {"GB": 1.0, "TB": 1e3, "MB": 1e-3, "GiB": 2**30 / 1e9, "TiB": 2**40 / 1e9}),
    "Millis": ("milliseconds", {"ms": 1.0, "s": 1e3, "us": 1e-3}),
    "econds": ("seconds", {"s": 1.0, "ms": 1e-3, "us": 1e-6}),
    "okens": ("tokens", {"K": 1024.0, "k": 1000.0, "M": 2.0**20}),
}


class Section:
    """A mapping of the file at `where`, a dotted path. All raise ConfigError for what is missing or not of its kind."""

    def __init__(self, where: str, value: object) -> None:
        self.where = where
        if value is None and not where:
            raise ConfigError("the file is empty; it must describe a system, see docs/understand/capacity.md")
        if not isinstance(value, dict):
            raise ConfigError(f"{where or 'the file'} is {_shown(value)}; it must hold fields: name: value")
        self._fields = {str(key): field for key, field in cast(dict[object, Any], value).items()}
        self._known: dict[str, None] = {}

    @property
    def keys(self) -> list[str]:
        return list(self._fields)

    def has(self, key: str) -> bool:
        """Return whether a field that may be absent is there; another reader takes it."""
        self._known[key] = None
        return key in self._fields

    def number(self, key: str, default: object = _REQUIRED) -> float:
        """Take a finite number."""
        return _number(self._path(key), key, self._take(key, default))

    def optional(self, key: str) -> float | None:
        """Take a number above 0 that may be absent."""
        if key not in self._fields:
            self._take(key, None)
            return None
        value = self.number(key)
        if value <= 0:
            raise ConfigError(f"{self._path(key)} is {value:g}; it must be above 0, or absent")
        return value

    def positive(self, key: str) -> float:
        """Take a number above 0."""
        value = self.number(key)
        if value <= 0:
            raise ConfigError(f"{self._path(key)} is {value:g}; it must be above 0")
        return value

    def whole(self, key: str, default: object = _REQUIRED) -> int:
        """Take a whole number of at least 0."""
        return _whole(self._path(key), self.number(key, default))

    def at_least(self, low: int, key: str) -> int:
        """Take a whole number of at least `low`."""
        value = self.whole(key)
        if value < low:
            raise ConfigError(f"{self._path(key)} is {value}; it must be a whole number of at least {low}")
        return value

    def is_mapping(self, key: str) -> bool:
        return isinstance(self._fields.get(key), dict)

    def numbers(self, key: str) -> list[float]:
        return [_number(f"{self._path(key)}[{i}]", key, value) for i, value in enumerate(self._list(key))]

    def integers(self, key: str) -> list[int]:
        return [_whole(f"{self._path(key)}[{i}]", value) for i, value in enumerate(self.numbers(key))]

    def text(self, key: str) -> str:
        value = self._take(key, _REQUIRED)
        if not isinstance(value, str) or not value:
            raise ConfigError(f"{self._path(key)} is {_shown(value)}; it must be a name")
        return value

    def name_of(self, key: str, known: Iterable[str]) -> str:
        value = self.text(key)
        if value not in known:
            raise ConfigError(f"{self._path(key)} is {value!r}; there are: {', '.join(known) or 'none'}")
        return value

    def mapping(self, key: str, default: object = _REQUIRED) -> dict[str, Any]:
        """Take a section as it stands."""
        return Section(self._path(key), self._take(key, default))._fields

    def section(self, key: str, read: Callable[["Section"], T], default: object = _REQUIRED) -> T:
        """Take what `read` makes of a section; it must take all fields."""
        section = Section(self._path(key), self._take(key, default))
        found = read(section)
        section.end()
        return found

    def sections(self, key: str, read: Callable[["Section"], T]) -> list[T]:
        """Take a list of sections, as `section` does; an absent one is empty."""
        found: list[T] = []
        for i, value in enumerate(self._list(key, [])):
            section = Section(f"{self._path(key)}[{i}]", value)
            if isinstance(name := section._fields.get("name"), str):
                section.where = f"{self._path(key)}.{name}"
            found.append(read(section))
            section.end()
        return found

    def one_of(self, *keys: str) -> str:
        """Return which one of the fields is there."""
        there = [key for key in keys if key in self._fields]
        if len(there) != 1:
            raise ConfigError(
                f"{self.where} has {' and '.join(there) or 'none'} of {', '.join(keys)}; give exactly one"
            )
        self._known.update(dict.fromkeys(keys))
        return there[0]

    def end(self) -> None:
        """Refuse the fields that were not taken."""
        for key in self._fields:
            if key not in self._known:
                raise ConfigError(f"{self._path(key)} is no field here; {_advice(key, list(self._known))}")

    def _path(self, key: str) -> str:
        return f"{self.where}.{key}" if self.where else key

    def _take(self, key: str, default: object) -> object:
        self._known[key] = None
        value = self._fields.get(key, default)
        if value is _REQUIRED:
            for other in self._fields:
                if _alike(other, key):
                    raise ConfigError(f"{self._path(key)} is missing; the file has {other}: {_advice(other, [key])}")
            raise ConfigError(f"{self._path(key)} is missing; add it")
        return value

    def _list(self, key: str, default: object = _REQUIRED) -> list[Any]:
        value = self._take(key, default)
        if not isinstance(value, list):
            raise ConfigError(f"{self._path(key)} is {_shown(value)}; it must be a list")
        return cast(list[Any], value)


def _number(where: str, key: str, value: object) -> float:
    if isinstance(value, str):
        # YAML 1.1 reads 1e-4, without a dot, as a string.
        try:
            value = float(value)
        except ValueError:
            raise ConfigError(f"{where} is {_shown(value)}; {_number_advice(key, value)}") from None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"{where} is {_shown(value)}; it must be a number")
    if not abs(value) < 1e300:
        raise ConfigError(f"{where} is {value}; it must be a finite number")
    return float(value)


def _whole(where: str, value: float) -> int:
    if value < 0 or not math.isfinite(value) or value != int(value):
        raise ConfigError(f"{where} is {value:g}; it must be a whole number of at least 0")
    return int(value)


def _number_advice(key: str, text: str) -> str:
    """Return the number to write instead of a number with a unit, or of a percentage."""
    for ending, (unit, factors) in _UNITS.items():
        if key.endswith(ending):
            found = _WITH_UNIT.fullmatch(text)
            if found and found[2] in factors and found[1].count(".") < 2:
                return f"write the number alone, in {unit}: {float(found[1]) * factors[found[2]]:.15g}"
            return f"write a number alone, in {unit}"
    if found := _PERCENT.fullmatch(text):
        return f"if it is a share, write it as a fraction: {float(found[1]) / 100:.15g}"
    return "it must be a number"


def _alike(key: str, other: str) -> bool:
    """Return True when two names differ only in case, underscores or unit."""
    return _without_unit(key) == _without_unit(other)


def _without_unit(key: str) -> str:
    bare = re.sub(r"(?:_?(?:[KMGTkmgt]?i?[bB](?:it)?(?:p?s|/s)?|[sS]econds|[mM]illis|[mM]s|[bB]ytes))+$", "", key)
    return bare.lower().replace("_", "")


def _advice(key: str, known: list[str]) -> str:
    for name in known:
        if _alike(key, name) and key != name:
            for ending, (unit, factors) in _UNITS.items():
                factor = factors.get(key[len(name) - len(ending) :])
                if name.endswith(ending) and factor and factor != 1:
                    return f"it is {name}, in {unit}: multiply by {factor:.10g}"
            return f"it is {name}"
    close = difflib.get_close_matches(key, known, 1)
    return f"did you mean {close[0]}?" if close else f"there are: {', '.join(known)}"


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
