"""Kimi's tool format: calls in a section behind what is said, with ids that carry the name.

    <|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>{"city": "Oslo"}
    <|tool_call_end|><|tool_calls_section_end|>                                             (without line ends)

The id goes to the client as it is, because the template wants it back in that form. Source: tool_call_guidance.md of
moonshotai/Kimi-K2-Instruct.
"""

from collections.abc import Sequence
from typing import Final

from prfaas_worker.front.tools.events import Argued, Called, Content, Event, MarkedText, NewId
from prfaas_worker.front.tools.functions import Function, Mark, alternatives, arguments_rule, literal

SECTION: Final = "<|tool_calls_section_begin|>"
SECTION_END: Final = "<|tool_calls_section_end|>"
CALL: Final = "<|tool_call_begin|>"
ARGUMENTS: Final = "<|tool_call_argument_begin|>"
CALL_END: Final = "<|tool_call_end|>"
MARKS: Final = (SECTION, SECTION_END, CALL, ARGUMENTS, CALL_END)


class Parser:
    """Reads one answer. `_state` is the mark last read: it says what the text behind it is."""

    def __init__(self, new_id: NewId):
        self._new_id = new_id
        self._text = MarkedText()
        self._content = Content()
        self._state = SECTION_END
        self._id = ""
        self._calls = 0

    def push(self, text: str, *, final: bool) -> list[Event]:
        """Take more text; return what is certain now."""
        self._text.rest += text
        events: list[Event] = []
        mark: str | None = ""
        while mark is not None:
            found, mark = self._text.take(MARKS, final=final)
            events += self._found(found)
            if self._state == CALL and (mark is not None or final):
                events += self._call()
            self._state = mark or self._state
        return events

    def _found(self, text: str) -> list[Event]:
        if self._state == SECTION_END:
            return self._content.said(text)
        if self._state == CALL:
            self._id += text
        if self._state == ARGUMENTS and text:
            return [Argued(self._calls - 1, text)]
        return []  # between calls, or between the marks of one

    def _call(self) -> list[Event]:
        """Return the call whose id is complete: functions.NAME:NUMBER."""
        call_id, self._id = self._id.strip(), ""
        name = call_id.rpartition(":")[0] or call_id
        self._calls += 1
        self._content.called()
        return [Called(self._calls - 1, call_id or self._new_id(), name.removeprefix("functions."))]


def lark(functions: Sequence[Function], mark: Mark, most: int) -> str:
    """Return the rule `rest`, of one to `most` calls without the opening mark, and what it is made of."""
    begin, between, end = mark(CALL), mark(ARGUMENTS), mark(CALL_END)
    calls = [
        f"{begin} {literal(f'functions.{function.name}:')} NUMBER {between} {arguments_rule(function)} {end}"
        for function in functions
    ]
    head = f"rest: call{{1,{most}}} {mark(SECTION_END)}\nNUMBER: /0|[1-9][0-9]?/"
    return alternatives(head, calls)
