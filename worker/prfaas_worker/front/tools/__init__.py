"""Tool calls: which format a model's chat template teaches, how answers in it are read, and grammars that demand it.

The format is told from the template: it shows the model the very marks that answers then hold. A module a format.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

from prfaas_worker.front.tools import hermes, kimi, turns
from prfaas_worker.front.tools.events import NewId, ToolParser
from prfaas_worker.front.tools.functions import Function, Mark, literal

MOST_CALLS: Final = 16
"""Calls that an answer may hold where calls are demanded: it ends at last."""


class ToolFormat(NamedTuple):
    """A format: its name and marks, how answers in it are read, and the Lark rule of what stands behind the first mark.

    That mark opens calls; text before it is for the user.
    """

    name: str
    marks: tuple[str, ...]
    parser: Callable[[NewId], ToolParser]
    lark: Callable[[Sequence[Function], Mark, int], str]


# By the mark that a template of that format writes; more particular ones first.
_BY_MARK: Final[Mapping[str, ToolFormat]] = {
    kimi.SECTION: ToolFormat("kimi", kimi.MARKS, kimi.Parser, kimi.lark),
    turns.CALL: ToolFormat("turns", turns.MARKS, turns.Parser, turns.lark),
    hermes.CALL: ToolFormat("hermes", hermes.MARKS, hermes.Parser, hermes.lark),
}


def tool_format(template_source: str) -> ToolFormat | None:
    """Return the format that a chat template teaches, None if it knows none that we know."""
    return next((known for mark, known in _BY_MARK.items() if mark in template_source), None)


def calls_grammar(known: ToolFormat, functions: list[Function], tokens: Mapping[str, int], most: int) -> str:
    """Return the Lark rule `calls` of one to `most` calls of these functions, and what it is made of.

    `tokens` are the ids of marks that are special tokens and no letters.
    """
    return f"calls: {_mark(known.marks[0], tokens)} rest\n" + _rest(known, functions, tokens, most)


def free_grammar(known: ToolFormat, functions: list[Function], tokens: Mapping[str, int], most: int) -> str:
    """Return the grammar of an answer in which calls may stand behind text, and are sound if they do."""
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
