"""Parts that all tool formats share: events of an answer, a reader of marked text, and pieces of grammars of calls.

An answer arrives in pieces cut anywhere. The joined events are the same for all cuts. Text that may be the beginning of
a mark is held back until it is clear. Grammars are in llguidance's Lark.
"""

import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from prfaas_worker.grammars import lark_of_schema


class TextDelta(NamedTuple):
    """Text for the user."""

    text: str


class CallDelta(NamedTuple):
    """The beginning of call number `index`."""

    index: int
    call_id: str
    name: str


class ArgumentsDelta(NamedTuple):
    """More of that call's arguments: JSON as text."""

    index: int
    text: str


ToolEvent = TextDelta | CallDelta | ArgumentsDelta
NewId = Callable[[], str]


def random_id() -> str:
    """Return a new id for a tool call."""
    return f"call_{secrets.token_hex(12)}"


class ToolParser(ABC):
    """Reads the text and the calls of one answer. `_rest` is the text that waits to be read."""

    def __init__(self, new_id: NewId):
        self._new_id = new_id
        self._rest = ""
        self._calls = 0
        self._after_call = False

    @abstractmethod
    def push(self, text: str, *, final: bool) -> list[ToolEvent]:
        """Add text; return the events that are certain now."""

    def _take(self, marks: Sequence[str], *, final: bool) -> tuple[str, str | None]:
        """Remove and return the text before the first of `marks`, and that mark. Without a mark it returns the text
        that cannot begin one, and None."""
        found = [(place, mark) for mark in marks if (place := self._rest.find(mark)) >= 0]
        if found:
            place, mark = min(found)
            text, self._rest = self._rest[:place], self._rest[place + len(mark) :]
            return text, mark
        end = len(self._rest) - (0 if final else possible_beginning(self._rest, marks))
        text, self._rest = self._rest[:end], self._rest[end:]
        return text, None

    def _said(self, text: str) -> list[ToolEvent]:
        """Return text around calls, without spaces that only separate calls."""
        if self._after_call:
            text = text.lstrip()
        if not text:
            return []
        self._after_call = False
        return [TextDelta(text)]

    def _called(self, name: str, call_id: str) -> CallDelta:
        self._calls += 1
        self._after_call = True
        return CallDelta(self._calls - 1, call_id, name)


def possible_beginning(text: str, marks: Sequence[str]) -> int:
    """Length of the longest end of `text` that begins one of `marks` without completing it."""
    longest = 0
    for mark in marks:
        for length in range(min(len(mark) - 1, len(text)), longest, -1):
            if text.endswith(mark[:length]):
                longest = length
                break
    return longest


class Function(NamedTuple):
    """A function that the model may call. `parameters` is the JSON schema of its arguments."""

    name: str
    parameters: dict


RenderMark = Callable[[str], str]  # A mark in a grammar: the special token, or its letters if the tokenizer has none.


def arguments_rule(function: Function) -> str:
    return lark_of_schema(msgspec.json.encode({"type": "object"} | function.parameters).decode())


def literal(text: str) -> str:
    """Return a grammar term for this text."""
    return msgspec.json.encode(text).decode()


def repeated(separator: str, most: int) -> str:
    """Return one to `most` times the rule `call`, with `separator` between them."""
    return f"call ({separator} call){{0,{most - 1}}}" if most > 1 else "call"


def alternatives(head: str, calls: Sequence[str]) -> str:
    """Return rules in which `call` is one of `calls`."""
    names = [f"call_{number}" for number in range(len(calls))]
    rules = [f"{name}: {call}" for name, call in zip(names, calls, strict=True)]
    return "\n".join([head, f"call: {' | '.join(names)}", *rules])
