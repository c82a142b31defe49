"""Fits a conversation's past to what a chat template can take: roles that it does not know, arguments of past calls.

A past call is data, whatever it holds: a model's arguments may have been cut, or be no JSON at all. Templates take
arguments as text, as an object, or as both. Which, shows when a template renders a call of each kind once.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

OLDER_ROLES: Final = {"developer": "system", "function": "tool"}
"""Roles of OpenAI's API, and those that a template has in their place unless its source names them."""
MAX_NESTING: Final = 64
_ID: Final = "prfaas001"  # some templates want nine letters or digits
_SAMPLE: Final = {"k": "v"}

_Message = Mapping[str, Any]
_Render = Callable[[Sequence[_Message]], str]


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Write JSON as it is, as templates' filter `tojson`: Jinja's own one escapes `<` and `>` for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class _Unprintable(dict[str, Any]):
    """An object that only JSON and its own items show: printed as it is, it would be Python's text."""

    def __str__(self) -> str:
        raise TypeError("an object is no text")

    __repr__ = __str__


class Past(NamedTuple):
    """What a template takes."""

    roles: Mapping[str, str]
    takes_text: bool
    takes_objects: bool
    """Whether an object is rendered in another way than its text, or is the only way."""

    def fit(self, message: _Message) -> dict[str, Any]:
        """Return a message whose role and past calls the template can take."""
        fitted = {**message, "role": self.roles.get(message["role"], message["role"])}
        if calls := message.get("tool_calls"):
            fitted["tool_calls"] = [self._call(call) for call in calls]
        return fitted

    def _call(self, call: Mapping[str, Any]) -> Mapping[str, Any]:
        if isinstance(function := call.get("function"), Mapping):
            return {**call, "function": self._call(function)}
        return {**call, "arguments": self._arguments(call.get("arguments"))} if "name" in call else call

    def _arguments(self, given: Any) -> str | dict[str, Any]:
        text = given if isinstance(given, str) else to_json(given)
        if text.strip() in ("", "null"):
            text = "{}"
        found = _read_object(text) if self.takes_objects else None
        if found is not None:
            return found
        return text if self.takes_text else {"arguments": text}


def past_of(source: str, render: _Render) -> Past:
    """Return what a template takes; `render` returns "" for what it refuses."""
    roles = {role: older for role, older in OLDER_ROLES.items() if not re.search(f"""['"]{role}['"]""", source)}
    text = to_json(_SAMPLE)
    by_text, by_object = render(_sample(text)), render(_sample(_Unprintable(_SAMPLE)))
    takes_text = text in by_text
    return Past(roles, takes_text, not takes_text or by_object not in ("", by_text))


def _sample(arguments: Any) -> list[_Message]:
    call = {"id": _ID, "type": "function", "function": {"name": "f", "arguments": arguments}}
    return [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "b", "name": "f", "tool_call_id": _ID},
    ]


def _read_object(text: str) -> dict[str, Any] | None:
    """Return the object that a text is; None if it is none, or one that cannot become a prompt again."""
    try:
        found = json.loads(text)
        to_json(found).encode()  # an escape may stand for half of a character
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) and not _is_deep(found, MAX_NESTING) else None


def _is_deep(value: Any, levels: int) -> bool:
    if not isinstance(value, (dict, list)):
        return False
    entries = value.values() if isinstance(value, dict) else value
    return not levels or any(_is_deep(entry, levels - 1) for entry in entries)
