"""The tool format of Hermes, Qwen and many more: a JSON object with name and arguments between two tags.

    <tool_call>
    {"name": "weather", "arguments": {"city": "Oslo"}}
    </tool_call>

The arguments stand inside of JSON that ends elsewhere, so the reader follows its strings and braces to stream them. An
object in another order is read when it is complete, and what is no call at all comes back as text.
"""

import re
from collections.abc import Sequence
from typing import Final

import msgspec

from prfaas_worker.front.tools.events import Argued, Called, Content, Event, MarkedText, NewId
from prfaas_worker.front.tools.functions import Function, Mark, alternatives, arguments_rule, literal, repeated

CALL: Final = "<tool_call>"
CALL_END: Final = "</tool_call>"
MARKS: Final = (CALL, CALL_END)
_HEAD: Final = re.compile(r'\s*\{\s*"name"\s*:\s*"([^"\\<]*)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
_SIGN: Final = re.compile(r'["\\{}\[\]<]')


class _Object(msgspec.Struct):
    """A call in any order."""

    name: str
    arguments: msgspec.Raw = msgspec.Raw()
    parameters: msgspec.Raw = msgspec.Raw()


class Parser:
    """Reads one answer; `_read` is the method for the part that comes now."""

    def __init__(self, new_id: NewId):
        self._new_id = new_id
        self._text = MarkedText()
        self._content = Content()
        self._calls = 0
        self._read = self._read_content
        self._depth, self._in_string = 0, False

    def push(self, text: str, *, final: bool) -> list[Event]:
        """Take more text; return what is certain now."""
        self._text.rest += text
        events: list[Event] = []
        read = None
        while read != self._read:
            read = self._read
            events += read(final)
        return events

    def _read_content(self, final: bool) -> list[Event]:
        text, mark = self._text.take((CALL,), final=final)
        if mark:
            self._read = self._read_head
        return self._content.said(text)

    def _read_head(self, final: bool) -> list[Event]:
        """Wait for the name, or for the whole call if its fields come in another order."""
        head = _HEAD.match(self._text.rest)
        if head:
            self._text.rest = self._text.rest[head.end() :]
            self._read = self._read_arguments
            return [self._called(head[1])]
        body, end, rest = self._text.rest.partition(CALL_END)
        if not end and not final:
            return []
        self._text.rest, self._read = rest, self._read_content
        try:
            call = msgspec.json.decode(body, type=_Object)
        except msgspec.MsgspecError:
            return self._content.said(CALL + body + end)
        arguments = bytes(call.arguments) or bytes(call.parameters) or b"{}"
        return [self._called(call.name), Argued(self._calls - 1, arguments.decode())]

    def _read_arguments(self, final: bool) -> list[Event]:
        """Pass the object on to its closing brace; a tag between values ends one that is damaged."""
        text, place, end = self._text.rest, 0, None
        while end is None and (sign := _SIGN.search(text, place)):
            place = sign.end()
            match sign[0]:
                case '"':
                    self._in_string = not self._in_string
                case "\\" if self._in_string:
                    if place == len(text):  # what it escapes is still to come
                        place -= 1
                        break
                    place += 1
                case "{" | "[" if not self._in_string:
                    self._depth += 1
                case "}" | "]" if not self._in_string:
                    self._depth -= 1
                    end = place if self._depth == 0 else None
                case "<" if not self._in_string:
                    end = place - 1
        else:
            place = len(text)
        end = len(text) if final and end is None else end
        cut = place if end is None else end
        self._text.rest = text[cut:]
        if end is not None:
            self._depth, self._in_string = 0, False
            self._read = self._read_end
        return [Argued(self._calls - 1, text[:cut])] if cut else []

    def _read_end(self, final: bool) -> list[Event]:
        _, mark = self._text.take((CALL_END,), final=final)
        if mark:
            self._read = self._read_content
        return []

    def _called(self, name: str) -> Called:
        self._calls += 1
        self._content.called()
        return Called(self._calls - 1, self._new_id(), name)


def lark(functions: Sequence[Function], mark: Mark, most: int) -> str:
    """Return the rule `rest`, of one to `most` calls without the opening mark, and what it is made of."""
    separator = f"{literal(chr(10))} {mark(CALL)}"
    return alternatives(
        f"rest: {repeated(separator, most)}",
        [
            f"{literal(_head(function))} {arguments_rule(function)} {literal('}' + chr(10))} {mark(CALL_END)}"
            for function in functions
        ],
    )


def _head(function: Function) -> str:
    return f'\n{{"name": "{function.name}", "arguments": '
