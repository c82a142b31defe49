"""The tool format of the model that ships along: `<|tool|>NAME`, a line end, the arguments as JSON; and so on.

    <|assistant|>Let me look.<|tool|>weather
    {"city": "Oslo"}<|tool|>weather
    {"city": "Rome"}<|end_of_turn|>

One special token suffices: a call ends where the next one or the turn does.
"""

from collections.abc import Sequence
from typing import Final

from prfaas_worker.front.tools.events import Argued, Called, Content, Event, MarkedText, NewId
from prfaas_worker.front.tools.functions import Function, Mark, alternatives, arguments_rule, literal, repeated

CALL: Final = "<|tool|>"
MARKS: Final = (CALL,)


class Parser:
    """Reads one answer."""

    def __init__(self, new_id: NewId):
        self._new_id = new_id
        self._text = MarkedText()
        self._content = Content()
        self._name: str | None = None  # of the call whose first line is still coming
        self._calls = 0
        self._in_arguments = False

    def push(self, text: str, *, final: bool) -> list[Event]:
        """Take more text; return what is certain now."""
        self._text.rest += text
        events: list[Event] = []
        mark: str | None = ""
        while mark is not None:
            marks = MARKS if self._name is None else ("\n", CALL)
            found, mark = self._text.take(marks, final=final)
            events += self._found(found, mark, final=final)
        return events

    def _found(self, text: str, mark: str | None, *, final: bool) -> list[Event]:
        if self._name is not None:
            self._name += text
            if mark is None and not final:
                return []
            events: list[Event] = [Called(self._calls, self._new_id(), self._name.strip())]
            self._calls += 1
            self._content.called()
            self._name = "" if mark == CALL else None
            self._in_arguments = True
            return events
        if mark == CALL:
            self._name = ""
        if self._in_arguments:
            return [Argued(self._calls - 1, text)] if text else []
        return self._content.said(text)


def lark(functions: Sequence[Function], mark: Mark, most: int) -> str:
    """Return the rule `rest`, of one to `most` calls without the opening mark, and what it is made of."""
    return alternatives(
        f"rest: {repeated(mark(CALL), most)}",
        [f"{literal(function.name + chr(10))} {arguments_rule(function)}" for function in functions],
    )
