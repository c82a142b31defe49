"""The functions that a request offers, and the pieces of which grammars of calls are built, in llguidance's Lark."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from prfaas_worker.grammars import lark_of_schema


class Function(NamedTuple):
    """A function the model may call. `parameters` is the JSON schema of its arguments."""

    name: str
    parameters: dict


Mark = Callable[[str], str]
"""A mark in a grammar's words: the special token, or its letters where the tokenizer has none."""


def arguments_rule(function: Function) -> str:
    """Return the rule for a function's arguments."""
    return lark_of_schema(msgspec.json.encode({"type": "object"} | function.parameters).decode())


def literal(text: str) -> str:
    """Return a string that stands for itself."""
    return msgspec.json.encode(text).decode()


def repeated(separator: str, most: int) -> str:
    """Return one to `most` times the rule `call`, with `separator` between them."""
    return f"call ({separator} call){{0,{most - 1}}}" if most > 1 else "call"


def alternatives(head: str, calls: Sequence[str]) -> str:
    """Return rules of which `call` is one of `calls`."""
    names = [f"call_{number}" for number in range(len(calls))]
    rules = [f"{name}: {call}" for name, call in zip(names, calls, strict=True)]
    return "\n".join([head, f"call: {' | '.join(names)}", *rules])
