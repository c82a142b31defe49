"""What a request may ask of an engine's libraries: bounds of grammars, schemas, patterns, templates, stops and biases.

Compilers of grammars recurse. A chain of some thousand rules or references overflows the native stack, and the process
dies without an exception to catch. A pattern of 15 bytes may stand for millions of states. So all of this is bounded
here, before a library reads it. Nothing is parsed that is not JSON: counts are bounded instead, which no trick of a
grammar's syntax makes smaller. A chain of rules is no longer than their number, and nesting no deeper than the number
of brackets.

Repetitions through references of a schema or rules of a grammar are not multiplied. What still kills
engines is not sent to a third one (`prfaas.routing.quarantine`).
"""

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any, Final, cast

import msgspec

from prfaas.errors import UNREADABLE, RequestError

MAX_GUIDE_BYTES: Final = 1 << 20
"""The most bytes of a field with tools, schemas or grammars."""
KNOWN_BYTES: Final = 64 << 10
KNOWN_FIELDS: Final = 128
"""So many fields of so many bytes are known to be good; larger ones are read each time."""
MAX_DEPTH: Final = 100
"""Of JSON in such a field."""
MAX_VALUES: Final = 50_000
"""Members of objects and lists in such a field."""
MAX_RULES: Final = 500
"""Rules of a grammar, and references of a schema. Compilers were seen to die of 2,800; a grammar of C has 250."""
MAX_GROUPS: Final = 1000
"""Brackets that open in a grammar or a pattern."""
MAX_REPEATS: Final = 100_000
"""How often the repetitions of a pattern, or of a schema's nested lists, stand for one another."""
MAX_CHOICES: Final = 128
"""Answers to a prompt."""
MAX_STOPS: Final = 64
MAX_STOP_BYTES: Final = 1024
"""Of one string: the end of a text is compared with each of them at each token."""
MAX_STOP_TOKENS: Final = 128
MAX_BIASES: Final = 1024

_GUIDES: Final = frozenset(
    (
        *("tools", "functions", "response_format", "structured_outputs", "structural_tag", "text"),
        *("guided_json", "guided_regex", "guided_grammar", "guided_choice", "guided_decoding"),
        *("regex", "ebnf", "json_schema"),  # SGLang's
        *("output_format", "output_config"),  # of the Messages API
        "nvext",  # Dynamo's
    )
)
"""Fields that engines make grammars of."""
_PATTERNS: Final = frozenset({"pattern", "regex", "guided_regex", "whitespace_pattern"})
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
_REPEAT: Final = re.compile(r"(.?)\{\s*([0-9]*)\s*,?\s*([0-9]*)\s*\}", re.DOTALL)
_DEFINES: Final = re.compile(r":+")
_DIGITS: Final = 9
_Stops = str | list[str] | None


def check_fields(fields: Mapping[str, msgspec.Raw]) -> None:
    """Check the fields of a body, as they are written.

    Raises RequestError, with the field at fault, for one that is too large, too deep, or too costly for an engine.
    """
    for name in _GUIDES & fields.keys():
        _check_guide(name, bytes(fields[name]))
    if _is_given(fields, _TEMPLATE) or (
        _is_given(fields, _TEMPLATE_ARGUMENTS) and _TEMPLATE in _members(fields, _TEMPLATE_ARGUMENTS)
    ):
        raise _refusal(_TEMPLATE, "is a program that would run at the engine: leave it out, the model has its own")
    if _is_given(fields, "stop"):
        check_stops(_decoded(fields, "stop", _Stops))
    if _is_given(fields, "bad_words"):
        check_stops(_decoded(fields, "bad_words", _Stops), "bad_words")
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
    """Raise RequestError for a regular expression with too many groups or repetitions.

    Repetitions of single characters are added, those of anything else multiplied, as if each held all others.
    """
    if pattern.count("(") > MAX_GROUPS:
        raise _refusal(name, f"has a pattern of more than {MAX_GROUPS} groups")
    added, factor = 0, 1
    for before, low, high in _REPEAT.findall(pattern):
        times = _times(low, high)
        if before.isalnum() or before in {"_", ".", "]"}:
            added += times
        else:
            factor *= times
    if max(added, 1) * factor > MAX_REPEATS:
        raise _refusal(name, f"has a pattern whose repetitions stand for more than {MAX_REPEATS} characters")


def check_grammar(name: str, grammar: str) -> None:
    """Raise RequestError for a grammar, Lark's or EBNF, of too many rules, groups or repetitions."""
    if len(_DEFINES.findall(grammar)) > MAX_RULES:
        raise _refusal(name, f"has a grammar of more than {MAX_RULES} rules")
    if grammar.count("(") + grammar.count("[") > MAX_GROUPS:
        raise _refusal(name, f"has a grammar of more than {MAX_GROUPS} groups")
    for line in grammar.splitlines():
        check_pattern(name, line)


def _check_guide(name: str, field: bytes) -> None:
    if len(field) > MAX_GUIDE_BYTES:
        raise _refusal(name, f"has {len(field)} bytes, and may have {MAX_GUIDE_BYTES}")
    if len(field) <= KNOWN_BYTES:
        _check_known(name, field)
    else:
        _check_new(name, field)


def _check_new(name: str, field: bytes) -> None:
    _check_depth(name, field)
    _check_value(name, {name: _read(name, field)})


# An agent's tools come with each of its requests. An error is not kept.
_check_known = lru_cache(KNOWN_FIELDS)(_check_new)


def _check_depth(name: str, field: bytes) -> None:
    """Raise RequestError for JSON that is nested too deep, by its brackets outside of strings."""
    if field.count(b"{") + field.count(b"[") <= MAX_DEPTH:
        return
    outside = b"".join(field.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')[::2])
    steps = memoryview(outside.translate(_STEPS, _NO_BRACKETS)).cast("b")
    if max(accumulate(steps), default=0) > MAX_DEPTH:
        raise _refusal(name, f"holds JSON nested deeper than {MAX_DEPTH}")


def _check_value(name: str, value: Any) -> None:
    """Walk all that a field holds: schemas, and members that hold patterns, grammars or JSON by their names."""
    waiting: list[tuple[Any, int]] = [(value, 1)]
    references = values = 0
    while waiting:
        one, times = waiting.pop()
        values += len(one)
        if values > MAX_VALUES:
            raise _refusal(name, f"holds more than {MAX_VALUES} values")
        if not isinstance(one, dict):
            waiting += [(each, times) for each in one if isinstance(each, (dict, list))]
            continue
        members = cast(dict[str, Any], one)
        references += len(_REFERENCES & members.keys())
        if references > MAX_RULES:
            raise _refusal(name, f"has a schema of more than {MAX_RULES} references")
        times *= _most_items(members)
        if times > MAX_REPEATS:
            raise _refusal(name, f"has a schema whose nested lists stand for more than {MAX_REPEATS} values")
        for key, member in members.items():
            held = _check_text(name, key, member) if isinstance(member, str) else member
            if isinstance(held, (dict, list)):
                waiting.append((cast(Any, held), times))


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


def _times(low: str, high: str) -> int:
    return max(1, *(int(one[:_DIGITS] or 1) for one in (low, high)))


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
