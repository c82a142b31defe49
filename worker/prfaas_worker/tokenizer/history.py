"""Fits a conversation's past to what a chat template can take: roles that it does not know, calls of earlier answers.

A past call is data, whatever it holds: a model's arguments may have been cut, or be no JSON at all. Templates take
arguments as text, as an object, or as both. Some show a call only beside null, others take no null; some refuse long
ids. What a template takes shows when it renders samples with marks in them, once, when it is loaded.
"""

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

MAX_NESTING: Final = 64
_SHORT_ID: Final = re.compile("[A-Za-z0-9]{9}")  # the ids of Mistral's templates
_ID: Final = "prfaas001"
_LONG_ID: Final = "call_prfaas0000000000000001"
_CALLED: Final = "prfaascalled"
_SAMPLE: Final = {"k": _CALLED}
_WRITTEN: Final = "prfaaswritten"
_ODD: Final = "\ufdd2"  # no text holds it, so that it can be taken out again

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
    """The newer or older names of roles that it does not know, and its own names for them."""
    empties: Mapping[str | None, str | None]
    """Null and "" as the content beside calls, and what the template gets for each: the same, or the other."""
    takes_text: bool
    """Also if no sample shows a call: its text then stays as it was sent."""
    takes_objects: bool
    """Whether an object is rendered in another way than its text, or is the only way."""
    has_short_ids: bool

    def fit(self, message: _Message) -> dict[str, Any]:
        """Return a message whose role and past calls the template can take."""
        fitted = {**message, "role": self.roles.get(message["role"], message["role"])}
        if calls := message.get("tool_calls"):
            fitted["tool_calls"] = [self._call(call) for call in calls]
            content = message.get("content")
            fitted["content"] = content or self.empties[content]
        if "tool_call_id" in message:
            fitted["tool_call_id"] = self._id(message["tool_call_id"])
        return fitted

    def _call(self, call: Mapping[str, Any]) -> Mapping[str, Any]:
        fitted = dict(call)
        if isinstance(function := call.get("function"), Mapping):
            fitted["function"] = self._call(function)
            fitted.setdefault("type", "function")
        elif "name" in call:
            fitted["arguments"] = self._arguments(call.get("arguments"))
        if "id" in call:
            fitted["id"] = self._id(call["id"])
        return fitted

    def _id(self, sent: Any) -> Any:
        if not self.has_short_ids or _SHORT_ID.fullmatch(str(sent)):
            return sent
        return hashlib.sha256(str(sent).encode(errors="surrogatepass")).hexdigest()[:9]

    def _arguments(self, given: Any) -> str | dict[str, Any]:
        text = given if isinstance(given, str) else to_json(given)
        if text.strip() in ("", "null"):
            text = "{}"
        found = _read_object(text) if self.takes_objects else None
        if found is not None:
            return found
        return text if self.takes_text else {"arguments": text}


def past_of(render: _Render) -> Past:
    """Return what a template takes; `render` returns "" for what it refuses."""
    text, entries = to_json(_SAMPLE), _Unprintable(_SAMPLE)

    def render_call(content: str | None, arguments: Any, call_id: str = _ID) -> str:
        past = _write_call(content, arguments, call_id)
        return render([*past, _write_answer("tool", call_id)]) or render(past)

    def worth(content: str | None) -> tuple[bool, bool, int]:
        found = render_call(content, text) + render_call(content, entries)
        return _CALLED in found, found != "", -found.count("None")

    empties = {sent: max(sent, other, key=worth) for sent, other in ((None, ""), ("", None))}
    content = empties[""]
    by_text, by_object = render_call(content, text), render_call(content, entries)
    shows_objects = _CALLED in by_object or bool(by_object and not by_text)
    takes_text = text in by_text or not shows_objects
    arguments = text if takes_text else entries
    past = _write_call(content, arguments, _ID)
    samples: dict[str, tuple[str, Callable[[str], list[_Message]]]] = {
        "developer": ("system", lambda role: [{"role": role, "content": _WRITTEN}, *past[:1]]),
        "function": ("tool", lambda role: [*past, _write_answer(role, _ID)]),
    }
    return Past(
        roles={role: known for role, (known, sample) in samples.items() if not _knows(role, sample, render)},
        empties=empties,
        takes_text=takes_text,
        takes_objects=shows_objects and by_object != by_text,
        has_short_ids=bool(by_text + by_object) and not render_call(content, arguments, _LONG_ID),
    )


def _knows(role: str, sample: Callable[[str], list[_Message]], render: _Render) -> bool:
    """Return whether a template shows a role's message, and in another way than that of a role with any name."""
    found = render(sample(role))
    return _WRITTEN in found and found != render(sample(role + _ODD)).replace(_ODD, "")


def _write_call(content: str | None, arguments: Any, call_id: str) -> list[_Message]:
    function = {"name": "f", "arguments": arguments}
    call = {"id": call_id, "type": "function", "function": function, **function}  # nested, and in the flat form
    return [{"role": "user", "content": "a"}, {"role": "assistant", "content": content, "tool_calls": [call]}]


def _write_answer(role: str, call_id: str) -> _Message:
    return {"role": role, "content": _WRITTEN, "name": "f", "tool_call_id": call_id}


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
