"""What a request may ask of an engine's libraries: bounds of grammars, schemas, patterns, templates, stops and biases.

Compilers of grammars recurse. A chain of some thousand rules or references overflows the native stack, and the process
dies without an exception to catch. A pattern of 15 bytes may stand for millions of states. So all of this is bounded
here, before a library reads it. Nothing is parsed that is not JSON: counts are bounded instead, which no trick of a
grammar's syntax makes smaller. A chain of rules is no longer than their number, and nesting no deeper than the number
of brackets. Repetitions are multiplied, as if each held all others, and added across what is surely another alternative
of a rule. Each check costs time in proportion to its text: no expression here gives back what it has read.

Not bounded are repetitions through references of a schema or rules of a grammar, which are not multiplied, and patterns
whose automaton has more states than characters, as of `[ab]*a[ab]{30}`. What still kills engines is not sent to a third
one (`prfaas.routing.quarantine`).
"""

import re
import string
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any, Final, cast

import msgspec

from prfaas.errors import UNREADABLE, RequestError

MAX_GUIDE_BYTES: Final = 1 << 20
"""The most bytes of all fields with tools, schemas or grammars together."""
KNOWN_BYTES: Final = 64 << 10
KNOWN_FIELDS: Final = 128
"""So many fields of so many bytes are known to be good; larger ones are read each time."""
MAX_DEPTH: Final = 100
"""Of JSON in such a field."""
MAX_VALUES: Final = 50_000
"""Members of objects and lists in all of them."""
MAX_RULES: Final = 500
"""Rules of a grammar, and references of a schema. Compilers were seen to die of 2,800; a grammar of C has 250."""
MAX_GROUPS: Final = 1000
"""Brackets that open in a grammar; groups and repetitions of a pattern."""
MAX_REPEATS: Final = 100_000
"""How often the repetitions of a pattern, or of a schema's nested lists, stand for one another."""
MAX_CHOICES: Final = 128
"""Answers to a prompt."""
MAX_STOPS: Final = 64
MAX_STOP_BYTES: Final = 1024
"""Of one string: the end of a text is compared with each of them at each token."""
_MAX_STOPS_BYTES: Final = 6 * MAX_STOPS * (MAX_STOP_BYTES + 1)
"""Of all of them as they are written: a byte may be written as six."""
MAX_STOP_TOKENS: Final = 128
MAX_BIASES: Final = 1024

_GUIDES: Final = frozenset(
    (
        *("tools", "functions", "response_format", "structured_outputs", "structural_tag", "text"),
        *("guided_json", "guided_regex", "guided_grammar", "guided_choice", "guided_decoding"),
        *("guided_whitespace_pattern", "chat_template_kwargs"),
        *("regex", "ebnf", "json_schema"),  # SGLang's
        *("output_format", "output_config"),  # of the Messages API
        "nvext",  # Dynamo's
    )
)
"""Fields that engines make grammars of, or give to a template."""
_PATTERNS: Final = frozenset({"pattern", "regex", "guided_regex", "whitespace_pattern", "guided_whitespace_pattern"})
_PATTERN_KEYS: Final = "patternProperties"
"""The member of a schema whose keys are patterns."""
_GRAMMARS: Final = frozenset({"grammar", "guided_grammar", "ebnf", "definition"})
_JSON_TEXTS: Final = frozenset({"json", "guided_json", "json_schema", "schema", "structural_tag"})
"""Members that may hold JSON as a string."""
_REFERENCES: Final = frozenset({"$ref", "$dynamicRef", "$recursiveRef"})
_BRACKETS: Final = b"{[}]"
_NO_BRACKETS: Final = bytes(set(range(256)).difference(_BRACKETS))
_STEPS: Final = bytes.maketrans(_BRACKETS, b"\x01\x01\xff\xff")
"""How each bracket changes the depth, as signed bytes."""
_COUNTS: Final = ("minItems", "maxItems", "minProperties", "maxProperties")
_TEMPLATE: Final = "chat_template"
_TEMPLATE_ARGUMENTS: Final = "chat_template_kwargs"
_STOPS: Final = ("stop", "bad_words", "stop_sequences", "stop_regex")
_STOP_PATTERNS: Final = "stop_regex"
# Each + after a quantifier forbids to give back. Without it, white space after a bracket would cost its fourth power.
_TIMES: Final = r"\s*+([0-9]*+)\s*+(?:(?:,|\.\.)\s*+([0-9]*+)\s*+)?+"
_REPEAT: Final = re.compile(rf"\{{{_TIMES}\}}|~{_TIMES}")
"""As in x{2,3}, and x ~ 2..3 of Lark."""
_PLAIN: Final = (
    r"(?:[\w \t\r.,:=?!*+>-]++"  # names and signs
    r'|"(?:[^"\\\n]++|\\[^\n])*+"'  # a literal
    r"|#[^\n]*+|//[^\n]*+"  # comments
    r"|/(?:[^/\\\n]++|\\[^\n])++/"  # a pattern of Lark
    r"|\[\^?+[\w -]*+\])*+"  # a class of EBNF, or an option of Lark
)
_MARK: Final = re.compile(rf'{_PLAIN}(?:(?P<mark>[()|])|(?P<line>\n(?=[ \t]*+["(\w|]))|\n|{_REPEAT.pattern})')
"""The next bracket, alternative, line or repetition, behind what both EBNF and Lark read as this does, or refuse."""
_NAME: Final = string.ascii_letters + string.digits + "_"
_NAME_LENGTH: Final = 100
"""Longer ones are no items."""
_NEXT_RULE: Final = re.compile(r"\n(?=[ \t]*+[?!]?+\w[\w.-]*+[ \t]*+:)")
_DIGITS: Final = 9
_Stops = str | list[str] | None


def check_fields(fields: Mapping[str, msgspec.Raw]) -> None:
    """Check the fields of a body, as they are written.

    Raises RequestError, with the field at fault, for one that is too large, too deep, or too costly for an engine.
    """
    _check_guides({name: fields[name] for name in sorted(_GUIDES & fields.keys())})
    if _is_given(fields, _TEMPLATE) or (
        _is_given(fields, _TEMPLATE_ARGUMENTS) and _TEMPLATE in _members(fields, _TEMPLATE_ARGUMENTS)
    ):
        raise _refusal(_TEMPLATE, "is a program that would run at the engine: leave it out, the model has its own")
    for name in _STOPS:
        if _is_given(fields, name):
            _check_stop_field(fields, name)
    _at_most(fields, "stop_token_ids", MAX_STOP_TOKENS, "tokens", b",")
    _at_most(fields, "logit_bias", MAX_BIASES, "tokens", b",")
    for name in ("n", "best_of"):
        if _is_given(fields, name) and len(fields[name]) > 2 and (_decoded(fields, name, int) > MAX_CHOICES):
            raise _refusal(name, f"may be at most {MAX_CHOICES}")


def check_stops(stops: _Stops, name: str = "stop") -> None:
    """Raise RequestError for too many strings that end an answer, or too long ones."""
    found: Sequence[str] = [stops] if isinstance(stops, str) else stops or []
    if len(found) > MAX_STOPS:
        raise _refusal(name, f"may hold at most {MAX_STOPS} strings, not {len(found)}")
    if any(len(one) > MAX_STOP_BYTES or len(one.encode()) > MAX_STOP_BYTES for one in found):
        raise _refusal(name, f"has a string of more than {MAX_STOP_BYTES} bytes")


def check_pattern(name: str, pattern: str) -> None:
    """Raise RequestError for a regular expression with too many groups or repetitions."""
    _check_repeats(name, pattern, [(0, len(pattern))])


def check_grammar(name: str, grammar: str) -> None:
    """Raise RequestError for a grammar, Lark's or EBNF, of too many rules, groups or repetitions."""
    if grammar.count(":") - grammar.count("::") > MAX_RULES:
        raise _refusal(name, f"has a grammar of more than {MAX_RULES} rules")
    if grammar.count("(") + grammar.count("[") > MAX_GROUPS:
        raise _refusal(name, f"has a grammar of more than {MAX_GROUPS} groups")
    for rule in _NEXT_RULE.split(grammar):
        _check_repeats(name, rule, _alternatives(rule))


def _check_repeats(name: str, text: str, parts: Iterable[tuple[int, int]]) -> None:
    """Raise RequestError for too many groups or repetitions. `parts` are where the repetitions cannot hold those of
    other parts; they are looked at only if it matters."""
    if sum(map(text.count, "({~")) > MAX_GROUPS:
        raise _refusal(name, f"has a pattern of more than {MAX_GROUPS} groups and repetitions")
    if _characters(text, 0, len(text)) <= MAX_REPEATS:
        return
    if sum(_characters(text, begin, end) for begin, end in parts) > MAX_REPEATS:
        raise _refusal(name, f"has a pattern whose repetitions stand for more than {MAX_REPEATS} characters")


def _characters(text: str, begin: int, end: int) -> int:
    """Return how many characters the repetitions in a part of a text stand for, or some number above MAX_REPEATS.

    Those of single items are added, those of anything else multiplied, as if each held all others.
    """
    added, factor, characters = 0, 1, 0
    for found in _REPEAT.finditer(text, begin, end):
        times = max(1, *map(_number, found.groups("")))
        if _is_of_item(text, found.start()):
            added += times
        else:
            factor *= times
        characters = max(added, 1) * factor
        if characters > MAX_REPEATS:
            break
    return characters


def _is_of_item(text: str, start: int) -> bool:
    """Return whether the repetition that starts here is of a character, a class, a name or a literal."""
    if text[start] == "{":
        before = text[max(0, start - 1) : start]
        return before.isalnum() or before in {"_", ".", "]", '"'}
    before = text[max(0, start - _NAME_LENGTH) : start].rstrip(" \t")
    rest = before.rstrip(_NAME)
    name = before[len(rest) :]
    if not name:
        return rest.endswith('"')
    # Not the number of another repetition, the flags of a pattern, /x/i, a tab in JSON, \t, nor the end of a long name.
    return not name[0].isdigit() and not rest.endswith(("/", "\\")) and (rest != "" or start <= _NAME_LENGTH)


def _alternatives(rule: str) -> Iterator[tuple[int, int]]:
    """Yield the beginning and the end of each part of a rule that is surely an alternative, or a line of some.

    What is behind something that could be read in two ways, such as a class with a quote in it, is one part.
    """
    begin = end = depth = 0
    while (found := _MARK.match(rule, end)) is not None and depth >= 0:
        end = found.end()
        if found["mark"] == "(":
            depth += 1
        elif found["mark"] == ")":
            depth -= 1
        elif depth == 0 and (found["mark"] or found["line"]):
            yield begin, end
            begin = end
    yield begin, len(rule)


def _check_guides(guides: Mapping[str, msgspec.Raw]) -> None:
    size_bytes = sum(len(field) for field in guides.values())
    if size_bytes > MAX_GUIDE_BYTES:
        largest = max(guides, key=lambda name: len(guides[name]))
        raise _refusal(largest, f"and fields like it have {size_bytes} bytes, and may have {MAX_GUIDE_BYTES} together")
    values = 0
    for name, field in guides.items():
        check = _check_known if len(field) <= KNOWN_BYTES else _check_new
        values += check(name, bytes(field))
        if values > MAX_VALUES:
            raise _refusal(name, f"and fields like it hold more than {MAX_VALUES} values")


def _check_new(name: str, field: bytes) -> int:
    """Return how many values a field holds."""
    _check_depth(name, field)
    return _check_value(name, {name: _read(name, field)})


# An agent's tools come with each of its requests. An error is not kept.
_check_known = lru_cache(KNOWN_FIELDS)(_check_new)


def _check_stop_field(fields: Mapping[str, msgspec.Raw], name: str) -> None:
    if len(fields[name]) > _MAX_STOPS_BYTES:
        raise _refusal(name, f"may hold at most {MAX_STOPS} strings of {MAX_STOP_BYTES} bytes")
    stops: _Stops = _decoded(fields, name, _Stops)
    check_stops(stops, name)
    if name == _STOP_PATTERNS:
        for pattern in [stops] if isinstance(stops, str) else stops or []:
            check_pattern(name, pattern)


def _check_depth(name: str, field: bytes) -> None:
    """Raise RequestError for JSON that is nested too deep, by its brackets outside of strings."""
    if field.count(b"{") + field.count(b"[") <= MAX_DEPTH:
        return
    outside = b"".join(field.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')[::2])
    steps = memoryview(outside.translate(_STEPS, _NO_BRACKETS)).cast("b")
    if max(accumulate(steps), default=0) > MAX_DEPTH:
        raise _refusal(name, f"holds JSON nested deeper than {MAX_DEPTH}")


def _check_value(name: str, value: Any) -> int:
    """Walk all that a field holds: schemas, and members that hold patterns, grammars or JSON by their names.

    Returns how many values these are."""
    waiting: list[tuple[Any, int]] = [(value, 1)]
    references = values = 0
    while waiting:
        one, times = waiting.pop()
        values += len(one)
        if values > MAX_VALUES:
            raise _refusal(name, f"holds more than {MAX_VALUES} values")
        if not isinstance(one, dict):
            waiting += [(each, times) for each in one if each and isinstance(each, (dict, list))]
            continue
        members = cast(dict[str, Any], one)
        references += len(_REFERENCES & members.keys())
        if references > MAX_RULES:
            raise _refusal(name, f"has a schema of more than {MAX_RULES} references")
        times *= _most_items(members)
        if times > MAX_REPEATS:
            raise _refusal(name, f"has a schema whose nested lists stand for more than {MAX_REPEATS} values")
        for pattern in _keys(members.get(_PATTERN_KEYS)):
            check_pattern(name, pattern)
        for key, member in members.items():
            held = _check_text(name, key, member) if isinstance(member, str) else member
            if held and isinstance(held, (dict, list)):
                waiting.append((cast(Any, held), times))
    return values


def _check_text(name: str, key: str, text: str) -> Any:
    """Check a member that is a string; return what is to be walked on, if it is JSON."""
    if key in _PATTERNS:
        check_pattern(name, text)
    elif key in _GRAMMARS:
        check_grammar(name, text)
    elif key in _JSON_TEXTS:
        _check_depth(name, text.encode())
        try:
            return msgspec.json.decode(text)
        except (*UNREADABLE, ValueError):
            check_grammar(name, text)  # not JSON, whatever an engine makes of it
    return None


def _most_items(schema: Mapping[str, Any]) -> int:
    """Return how many values a schema of a list or an object stands for by its bounds; 1 without one."""
    return max((count for key in _COUNTS if type(count := schema.get(key)) is int and count > 0), default=1)


def _keys(found: Any) -> Iterable[str]:
    return cast(Mapping[str, Any], found) if isinstance(found, dict) else ()


def _number(digits: str) -> int:
    """Return the number, or another one that is too large as well."""
    return int(digits.lstrip("0")[:_DIGITS] or 0)


def _is_given(fields: Mapping[str, msgspec.Raw], name: str) -> bool:
    return name in fields and bytes(fields[name]) != b"null"


def _at_most(fields: Mapping[str, msgspec.Raw], name: str, most: int, what: str, mark: bytes) -> None:
    """Raise RequestError if a list or an object of numbers has more members, by the marks between them."""
    if name in fields and (found := bytes(fields[name]).count(mark) + 1) > most:
        raise _refusal(name, f"may hold at most {most} {what}, not {found}")


def _members(fields: Mapping[str, msgspec.Raw], name: str) -> Mapping[str, Any]:
    found = _read(name, bytes(fields[name]))
    return cast(Mapping[str, Any], found) if isinstance(found, dict) else {}


def _decoded(fields: Mapping[str, msgspec.Raw], name: str, kind: Any) -> Any:
    try:
        return msgspec.json.decode(fields[name], type=kind)
    except (*UNREADABLE, ValueError) as error:
        raise _refusal(name, f"cannot be read: {error}") from error


def _read(name: str, field: bytes) -> Any:
    try:
        return msgspec.json.decode(field)
    except (*UNREADABLE, ValueError) as error:  # the latter for numbers of thousands of digits
        raise _refusal(name, f"cannot be read: {error}") from error


def _refusal(name: str, what: str) -> RequestError:
    return RequestError(f"{name} {what}", param=name)
