"""One section of a hand-written file: its fields are taken one by one, and what nobody took is an error.

The messages are the purpose. Figures come from data sheets in other units, so a number written with its unit is
answered with the number to write, and a field that is unknown with the one that was probably meant.
"""

import difflib
import math
import re
from collections.abc import Iterable, Iterator
from typing import Any, Final, cast

from prfaas.errors import ConfigError

_REQUIRED: Final = object()
_WITH_UNIT: Final = re.compile(r"\s*([0-9.]+(?:[eE][-+]?[0-9]+)?)\s*([A-Za-z]+(?:/s|ps)?)\s*")
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
    "Millis": ("milliseconds", {"ms": 1.0, "s": 1e3, "us": 1e-3}),
    "econds": ("seconds", {"s": 1.0, "ms": 1e-3, "us": 1e-6}),
    "okens": ("tokens", {"K": 1024.0, "k": 1000.0, "M": 2.0**20}),
}


class Section:
    """A mapping of the file at `where`, a dotted path.

    Raises:
        ConfigError: it is no mapping; and from every method: the field is missing or not of its kind.

    """

    def __init__(self, where: str, value: object) -> None:
        self.where = where
        if value is None and not where:
            raise ConfigError("the file is empty; it must describe a system, see docs/capacity.md")
        if not isinstance(value, dict):
            raise ConfigError(f"{where or 'the file'} is {_shown(value)}; it must hold fields: name: value")
        self._fields = {str(key): field for key, field in cast(dict[object, Any], value).items()}
        self._asked: dict[str, None] = {}

    @property
    def keys(self) -> list[str]:
        """Return the names of all fields."""
        return list(self._fields)

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

    def whole(self, key: str, default: object = _REQUIRED) -> int:
        """Take a whole number of at least 0."""
        return _whole(self._path(key), self.number(key, default))

    def numbers(self, key: str) -> list[float]:
        """Take a list of numbers."""
        return [_number(f"{self._path(key)}[{i}]", key, value) for i, value in enumerate(self._list(key))]

    def wholes(self, key: str) -> list[int]:
        """Take a list of whole numbers of at least 0."""
        return [_whole(f"{self._path(key)}[{i}]", value) for i, value in enumerate(self.numbers(key))]

    def text(self, key: str) -> str:
        """Take a string that is not empty."""
        value = self._take(key, _REQUIRED)
        if not isinstance(value, str) or not value:
            raise ConfigError(f"{self._path(key)} is {_shown(value)}; it must be a name")
        return value

    def name_of(self, key: str, known: Iterable[str]) -> str:
        """Take a string that names one of the known."""
        value = self.text(key)
        if value not in known:
            raise ConfigError(f"{self._path(key)} is {value!r}; there are: {', '.join(known) or 'none'}")
        return value

    def mapping(self, key: str, default: object = _REQUIRED) -> dict[str, Any]:
        """Take a section as it stands."""
        return Section(self._path(key), self._take(key, default))._fields

    def section(self, key: str, default: object = _REQUIRED) -> "Section":
        """Take a section."""
        return Section(self._path(key), self._take(key, default))

    def sections(self, key: str) -> list["Section"]:
        """Take a list of sections; an absent one is empty."""
        found: list[Section] = []
        for i, value in enumerate(self._list(key, [])):
            section = Section(f"{self._path(key)}[{i}]", value)
            if isinstance(name := section._fields.get("name"), str):
                section.where = f"{self._path(key)}.{name}"
            found.append(section)
        return found

    def named(self) -> Iterator[tuple[str, "Section"]]:
        """Take every field as a section."""
        for key in self._fields:
            yield key, self.section(key)

    def one_of(self, *keys: str) -> str:
        """Return which one of the fields is there."""
        there = [key for key in keys if key in self._fields]
        if len(there) != 1:
            raise ConfigError(
                f"{self.where} has {' and '.join(there) or 'none'} of {', '.join(keys)}; give exactly one"
            )
        self._asked.update(dict.fromkeys(keys))
        return there[0]

    def end(self) -> None:
        """Refuse fields that nobody asked for."""
        for key in self._fields:
            if key not in self._asked:
                raise ConfigError(f"{self._path(key)} is no field here; {_advice(key, list(self._asked))}")

    def _path(self, key: str) -> str:
        return f"{self.where}.{key}" if self.where else key

    def _take(self, key: str, default: object) -> object:
        self._asked[key] = None
        value = self._fields.get(key, default)
        if value is _REQUIRED:
            hint = next((f"; {_advice(other, [key])}" for other in self._fields if _alike(other, key)), "")
            raise ConfigError(f"{self._path(key)} is missing{hint or '; add it'}")
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
    """Say what to write instead of a number with a unit."""
    for ending, (unit, factors) in _UNITS.items():
        if key.endswith(ending):
            found = _WITH_UNIT.fullmatch(text)
            if found and found[2] in factors and found[1].count(".") < 2:
                return f"write the number alone, in {unit}: {float(found[1]) * factors[found[2]]:.15g}"
            return f"write a number alone, in {unit}"
    return "it must be a number"


def _alike(key: str, other: str) -> bool:
    """Whether two names differ only in their case, underscores or unit."""
    return _without_unit(key) == _without_unit(other)


def _without_unit(key: str) -> str:
    return (
        re.sub(r"(?:_?(?:[KMGTkmgt]?i?[bB](?:it)?(?:p?s|/s)?|[sS]econds|[mM]illis|[mM]s|[bB]ytes))+$", "", key)
        .lower()
        .replace("_", "")
    )


def _advice(key: str, known: list[str]) -> str:
    """Say which known field was probably meant."""
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
