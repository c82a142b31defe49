"""What a tool parser says of an answer, and the reader of marked text that all of them are built on.

An answer arrives in pieces cut anywhere. Whatever the cuts, the joined events are the same: a piece that may be the
beginning of a mark is held back until it is clear.
"""

import secrets
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol


class Said(NamedTuple):
    """Text for the user."""

    text: str


class Called(NamedTuple):
    """The beginning of the call number `index`."""

    index: int
    call_id: str
    name: str


class Argued(NamedTuple):
    """More of that call's arguments: JSON as text."""

    index: int
    text: str


Event = Said | Called | Argued
NewId = Callable[[], str]


class ToolParser(Protocol):
    """Reads one choice's text."""

    def push(self, text: str, *, final: bool) -> list[Event]:
        """Take more text; return what is certain now. With `final`, what is left too."""
        ...


def random_id() -> str:
    """Return a call's id where the model gives none."""
    return f"call_{secrets.token_hex(12)}"


class MarkedText:
    """Text that waits to be read up to marks."""

    def __init__(self) -> None:
        self.rest = ""

    def take(self, marks: Sequence[str], *, final: bool) -> tuple[str, str | None]:
        """Remove and return the text before the first of `marks`, and that mark; it is removed as well.

        Without a mark in sight: the text that can be none's beginning, and None.
        """
        found = [(place, mark) for mark in marks if (place := self.rest.find(mark)) >= 0]
        if found:
            place, mark = min(found)
            text, self.rest = self.rest[:place], self.rest[place + len(mark) :]
            return text, mark
        keep = 0 if final else possible_beginning(self.rest, marks)
        end = len(self.rest) - keep
        text, self.rest = self.rest[:end], self.rest[end:]
        return text, None


class Content:
    """What is said around calls. Spaces that only set calls apart are dropped."""

    def __init__(self) -> None:
        self._after_call = False

    def said(self, text: str) -> list[Event]:
        """Return the event for some text, none where it is only spaces behind a call."""
        if self._after_call:
            text = text.lstrip()
        if not text:
            return []
        self._after_call = False
        return [Said(text)]

    def called(self) -> None:
        """Note that a call began."""
        self._after_call = True


def possible_beginning(text: str, marks: Sequence[str]) -> int:
    """Length of the longest end of `text` with which one of `marks` begins, and is not complete."""
    longest = 0
    for mark in marks:
        for length in range(min(len(mark) - 1, len(text)), longest, -1):
            if text.endswith(mark[:length]):
                longest = length
                break
    return longest
