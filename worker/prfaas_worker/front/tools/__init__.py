"""Tool calls: which format a model's chat template teaches, how answers in it are read, and grammars that demand it.

The format is told from the template: it shows the model the very marks that answers then hold. A module a format.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

from prfaas_worker.front.tools import hermes, kimi, turns
from prfaas_worker.front.tools.events import NewId, ToolParser
from prfaas_worker.front.tools.functions import Function, Mark

MOST_CALLS: Final = 16
"""Calls that an answer may hold where calls are demanded: it ends at last."""


class ToolFormat(NamedTuple):
    """A format: its name, its marks, how answers in it are read, and the Lark rule `calls`, of one to so many."""

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


def calls_rules(known: ToolFormat, functions: list[Function], specials: Mapping[str, int], *, parallel: bool) -> str:
    """Return the Lark rule `calls` of calls of these functions, one or if `parallel` more, and what it is made of."""

    def mark(text: str) -> str:
        return f"<[{specials[text]}]>" if text in specials else f'"{text}"'

    return known.lark(functions, mark, MOST_CALLS if parallel else 1)
