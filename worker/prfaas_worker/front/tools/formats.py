"""Defines the tool formats, each with a parser and a grammar rule, and finds the format of a chat template.

The template shows the model the marks that answers then hold.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

import msgspec

from prfaas_worker.front.tools.base import (
    ArgumentsDelta,
    Function,
    NewId,
    RenderMark,
    ToolEvent,
    ToolParser,
    alternatives,
    arguments_rule,
    literal,
    repeated,
)

MOST_CALLS: Final = 16  # Calls in an answer that must call: the limit makes it end.

_HERMES_CALL: Final = "<tool_call>"
_HERMES_CALL_END: Final = "</tool_call>"
_HERMES_MARKS: Final = (_HERMES_CALL, _HERMES_CALL_END)
_HEAD: Final = re.compile(r'\s*\{\s*"name"\s*:\s*"([^"\\<]*)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
_SIGN: Final = re.compile(r'["\\{}\[\]<]')


class _Object(msgspec.Struct):
    """A call with its fields in any order."""

    name: str
    arguments: msgspec.Raw = msgspec.Raw()
    parameters: msgspec.Raw = msgspec.Raw()


class HermesParser(ToolParser):
    """The tool format of Hermes, Qwen and many more: a JSON object with name and arguments between two tags.

        <tool_call>
        {"name": "weather", "arguments": {"city": "Oslo"}}
        </tool_call>

    The arguments are inside of JSON that ends elsewhere, so the reader follows its strings and braces to stream them.
    An object in another order is read when it is complete, and anything but a call is returned as text.

    `_read` is the method for the next part.
    """

    def __init__(self, new_id: NewId):
        super().__init__(new_id)
        self._read = self._read_content
        self._depth, self._in_string = 0, False

    def push(self, text: str, *, final: bool) -> list[ToolEvent]:
        self._rest += text
        events: list[ToolEvent] = []
        read = None
        while read != self._read:
            read = self._read
            events += read(final)
        return events

    def _read_content(self, final: bool) -> list[ToolEvent]:
        text, mark = self._take((_HERMES_CALL,), final=final)
        if mark:
            self._read = self._read_head
        return self._said(text)

    def _read_head(self, final: bool) -> list[ToolEvent]:
        """Wait for the name, or for the whole call if its fields are in another order."""
        head = _HEAD.match(self._rest)
        if head:
            self._rest = self._rest[head.end() :]
            self._read = self._read_arguments
            return [self._called(head[1], self._new_id())]
        body, end, rest = self._rest.partition(_HERMES_CALL_END)
        if not end and not final:
            return []
        self._rest, self._read = rest, self._read_content
        try:
            call = msgspec.json.decode(body, type=_Object)
        except msgspec.MsgspecError:
            return self._said(_HERMES_CALL + body + end)
        arguments = bytes(call.arguments) or bytes(call.parameters) or b"{}"
        called = self._called(call.name, self._new_id())
        return [called, ArgumentsDelta(called.index, arguments.decode())]

    def _read_arguments(self, final: bool) -> list[ToolEvent]:
        """Pass the object on to its closing brace; a tag between values ends a damaged one."""
        text, place, end = self._rest, 0, None
        while end is None and (sign := _SIGN.search(text, place)):
            place = sign.end()
            match sign[0]:
                case '"':
                    self._in_string = not self._in_string
                case "\\" if self._in_string:
                    if place == len(text):  # the escaped character is not here yet
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
        self._rest = text[cut:]
        if end is not None:
            self._depth, self._in_string = 0, False
            self._read = self._read_end
        return [ArgumentsDelta(self._calls - 1, text[:cut])] if cut else []

    def _read_end(self, final: bool) -> list[ToolEvent]:
        _, mark = self._take((_HERMES_CALL_END,), final=final)
        if mark:
            self._read = self._read_content
        return []


def _hermes_lark(functions: Sequence[Function], mark: RenderMark, most: int) -> str:
    separator = f"{literal(chr(10))} {mark(_HERMES_CALL)}"
    return alternatives(
        f"rest: {repeated(separator, most)}",
        [
            f"{literal(_head(function))} {arguments_rule(function)} {literal('}' + chr(10))} {mark(_HERMES_CALL_END)}"
            for function in functions
        ],
    )


def _head(function: Function) -> str:
    return f'\n{{"name": "{function.name}", "arguments": '


_KIMI_SECTION: Final = "<|tool_calls_section_begin|>"
_KIMI_SECTION_END: Final = "<|tool_calls_section_end|>"
_KIMI_CALL: Final = "<|tool_call_begin|>"
_KIMI_ARGUMENTS: Final = "<|tool_call_argument_begin|>"
_KIMI_CALL_END: Final = "<|tool_call_end|>"
_KIMI_MARKS: Final = (_KIMI_SECTION, _KIMI_SECTION_END, _KIMI_CALL, _KIMI_ARGUMENTS, _KIMI_CALL_END)


class KimiParser(ToolParser):
    """Kimi's tool format: calls in a section behind what is said, with ids that carry the name.

        <|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>{"city": "Oslo"}
        <|tool_call_end|><|tool_calls_section_end|>                                             (without line ends)

    The client gets the id unchanged, because the template wants it back in that form. Source: tool_call_guidance.md of
    moonshotai/Kimi-K2-Instruct.

    `_state` is the last mark read, which determines the kind of the next text.
    """

    def __init__(self, new_id: NewId):
        super().__init__(new_id)
        self._state = _KIMI_SECTION_END
        self._id = ""

    def push(self, text: str, *, final: bool) -> list[ToolEvent]:
        self._rest += text
        events: list[ToolEvent] = []
        mark: str | None = ""
        while mark is not None:
            found, mark = self._take(_KIMI_MARKS, final=final)
            events += self._found(found)
            if self._state == _KIMI_CALL and (mark is not None or final):
                call_id, self._id = self._id.strip(), ""
                name = call_id.rpartition(":")[0] or call_id
                events.append(self._called(name.removeprefix("functions."), call_id or self._new_id()))
            self._state = mark or self._state
        return events

    def _found(self, text: str) -> list[ToolEvent]:
        if self._state == _KIMI_SECTION_END:
            return self._said(text)
        if self._state == _KIMI_CALL:
            self._id += text
        if self._state == _KIMI_ARGUMENTS and text:
            return [ArgumentsDelta(self._calls - 1, text)]
        return []  # between calls, or between the marks of one


def _kimi_lark(functions: Sequence[Function], mark: RenderMark, most: int) -> str:
    begin, between, end = mark(_KIMI_CALL), mark(_KIMI_ARGUMENTS), mark(_KIMI_CALL_END)
    calls = [
        f"{begin} {literal(f'functions.{function.name}:')} NUMBER {between} {arguments_rule(function)} {end}"
        for function in functions
    ]
    head = f"rest: call{{1,{most}}} {mark(_KIMI_SECTION_END)}\nNUMBER: /0|[1-9][0-9]?/"
    return alternatives(head, calls)


_TURNS_CALL: Final = "<|tool|>"
_TURNS_MARKS: Final = (_TURNS_CALL,)


class TurnsParser(ToolParser):
    """The tool format of the model that ships along: `<|tool|>NAME`, a line end, the arguments as JSON; and so on.

        <|assistant|>Let me look.<|tool|>weather
        {"city": "Oslo"}<|tool|>weather
        {"city": "Rome"}<|end_of_turn|>

    One special token suffices: a call ends where the next one or the turn does.
    """

    def __init__(self, new_id: NewId):
        super().__init__(new_id)
        self._name: str | None = None  # of the call whose first line is still coming

    def push(self, text: str, *, final: bool) -> list[ToolEvent]:
        self._rest += text
        events: list[ToolEvent] = []
        mark: str | None = ""
        while mark is not None:
            marks = _TURNS_MARKS if self._name is None else ("\n", _TURNS_CALL)
            found, mark = self._take(marks, final=final)
            events += self._found(found, mark, final=final)
        return events

    def _found(self, text: str, mark: str | None, *, final: bool) -> list[ToolEvent]:
        if self._name is not None:
            self._name += text
            if mark is None and not final:
                return []
            called = self._called(self._name.strip(), self._new_id())
            self._name = "" if mark == _TURNS_CALL else None
            return [called]
        if mark == _TURNS_CALL:
            self._name = ""
        if self._calls:  # all text after the first call is arguments
            return [ArgumentsDelta(self._calls - 1, text)] if text else []
        return self._said(text)


def _turns_lark(functions: Sequence[Function], mark: RenderMark, most: int) -> str:
    return alternatives(
        f"rest: {repeated(mark(_TURNS_CALL), most)}",
        [f"{literal(function.name + chr(10))} {arguments_rule(function)}" for function in functions],
    )


class ToolFormat(NamedTuple):
    """A format: its name and marks, its parser, and the Lark rule after the first mark. The first mark opens calls;
    text before it is for the user."""

    name: str
    marks: tuple[str, ...]
    parser: Callable[[NewId], ToolParser]
    lark: Callable[[Sequence[Function], RenderMark, int], str]


# By the mark that a template of that format writes; more particular ones first.
_BY_MARK: Final[Mapping[str, ToolFormat]] = {
    _KIMI_SECTION: ToolFormat("kimi", _KIMI_MARKS, KimiParser, _kimi_lark),
    _TURNS_CALL: ToolFormat("turns", _TURNS_MARKS, TurnsParser, _turns_lark),
    _HERMES_CALL: ToolFormat("hermes", _HERMES_MARKS, HermesParser, _hermes_lark),
}


def tool_format(template_source: str) -> ToolFormat | None:
    """Return the format that a chat template teaches, None if it is unknown."""
    return next((known for mark, known in _BY_MARK.items() if mark in template_source), None)


def calls_grammar(known: ToolFormat, functions: list[Function], tokens: Mapping[str, int], most: int) -> str:
    """Return the Lark rule `calls` of one to `most` calls; `tokens` are the ids of marks that are special tokens."""
    return f"calls: {_mark(known.marks[0], tokens)} rest\n" + _rest(known, functions, tokens, most)


def free_grammar(known: ToolFormat, functions: list[Function], tokens: Mapping[str, int], most: int) -> str:
    """Return the grammar of an answer with optional, valid calls after text."""
    opening, rest = known.marks[0], _rest(known, functions, tokens, most)
    if opening in tokens:
        return f"start: TEXT? ({_mark(opening, tokens)} rest)?\nTEXT: /(?s:.+)/\n{rest}"
    # Of letters: text that never spells the mark, or text up to where it does for the first time.
    spelt = re.sub(r"([\\.+*?()|\[\]{}^$/])", r"\\\1", opening)
    free = f"TEXT: /(?s:.+)/ & ~/(?s:.*){spelt}(?s:.*)/\nuntil[lazy]: /(?s:.*){spelt}/"
    return f"start: TEXT? | until rest\n{free}\n{rest}"


def _rest(known: ToolFormat, functions: list[Function], tokens: Mapping[str, int], most: int) -> str:
    return known.lark(functions, lambda text: _mark(text, tokens), most)


def _mark(text: str, tokens: Mapping[str, int]) -> str:
    return f"<[{tokens[text]}]>" if text in tokens else literal(text)
