"""Special tokens: which there are, and how a rendered conversation is told apart from the letters that users write.

Special tokens come from the chat template alone. Users' strings are *guarded* before the template sees them: U+FDD0, a
character that no text may hold, goes in front of every place where a special token's letters begin, so that the split
of the rendered text finds the template's own tokens only, and takes the guards out again.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple

from prfaas.errors import RequestError

GUARD: Final = "\ufdd0"
END_OF_CONTENT: Final = "\ufdd1"
"""Marks, while a template renders, where the content ends that the model shall continue."""
_RESERVED: Final = re.compile(f"[{GUARD}{END_OF_CONTENT}]")


class Special(NamedTuple):
    """One special token. A hidden one adds nothing to the text; `strips_*` take the spaces beside it away.

    A plain one is no mark but text that users may write, such as a run of spaces: it is split off wherever it stands.
    """

    token_id: int
    hidden: bool = True
    plain: bool = False
    strips_left: bool = False
    strips_right: bool = False


class Specials:
    """The special tokens of one model, by their letters."""

    def __init__(self, by_text: Mapping[str, Special]):
        self.by_text = dict(by_text)
        self._marks = _pattern(text for text, special in self.by_text.items() if not special.plain)
        self._hidden = _pattern(text for text, special in self.by_text.items() if special.hidden)
        self._plain = _pattern(text for text, special in self.by_text.items() if special.plain)
        self._all = _pattern(self.by_text)

    def guard(self, value: Any, *, visible_too: bool = True) -> Any:
        """Return JSON-like `value` with all its strings guarded, mapping keys included.

        Args:
            value: what a user sent.
            visible_too: also the letters of tokens that show in answers; not for the assistant's own words, which bring
                such letters back.

        Raises:
            RequestError: a string holds one of the two characters that serve as marks.

        """
        if isinstance(value, str):
            return self._guard_text(value, self._marks if visible_too else self._hidden)
        if isinstance(value, Mapping):
            return {
                self.guard(key, visible_too=visible_too): self.guard(entry, visible_too=visible_too)
                for key, entry in value.items()
            }
        if isinstance(value, (list, tuple)):
            return [self.guard(entry, visible_too=visible_too) for entry in value]
        return value

    def split(self, rendered: str) -> list[str | int]:
        """Return rendered text as its special tokens' ids and the pieces between them, guards taken out, none empty."""
        return [part.replace(GUARD, "") if isinstance(part, str) else part for part in self._cut(rendered, self._all)]

    def split_plain(self, text: str) -> list[str | int]:
        """Return a plain prompt likewise, where only plain special tokens are told from letters."""
        return self._cut(text, self._plain)

    def _cut(self, text: str, pattern: re.Pattern[str]) -> list[str | int]:
        parts: list[str | int] = []
        begin, strip_left = 0, False
        for start, end in _unguarded(text, pattern):
            special = self.by_text[text[start:end]]
            parts += _piece(text[begin:start], strip_left, special.strips_left)
            parts.append(special.token_id)
            begin, strip_left = end, special.strips_right
        return parts + _piece(text[begin:], strip_left, False)

    @staticmethod
    def _guard_text(text: str, pattern: re.Pattern[str]) -> str:
        reserved = _RESERVED.search(text)
        if reserved:
            name = f"U+{ord(reserved[0]):04X}"
            raise RequestError(f"messages contain {name}, which is no character; remove it", param="messages")
        parts, start = [], 0
        found = pattern.search(text)
        while found:
            parts += [text[start : found.start()], GUARD]
            start = found.start()
            found = pattern.search(text, start + 1)
        return "".join(parts) + text[start:]


def _unguarded(text: str, pattern: re.Pattern[str]) -> Iterator[tuple[int, int]]:
    """Yield where special tokens stand. A look-behind in the pattern would slow the search tenfold."""
    start = 0
    while found := pattern.search(text, start):
        guarded = found.start() > 0 and text[found.start() - 1] == GUARD
        if not guarded:
            yield found.span()
        start = found.start() + 1 if guarded else found.end()


def _piece(text: str, strip_left: bool, strip_right: bool) -> list[str | int]:
    text = text.lstrip() if strip_left else text
    text = text.rstrip() if strip_right else text
    return [text] if text else []


def _pattern(texts: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern that finds the longest of `texts`, never found for none.

    Common beginnings are factored out: of a thousand alternatives each would be tried at every "<" of a page of HTML.
    """
    trie: dict[str, Any] = {}
    for text in texts:
        node = trie
        for character in text:
            node = node.setdefault(character, {})
        node[""] = {}
    return re.compile(_alternatives(trie) if trie else "(?!)")


def _alternatives(node: Mapping[str, Any]) -> str:
    endings = [re.escape(character) + _alternatives(then) for character, then in node.items() if character]
    if not endings:
        return ""
    return f"(?:{'|'.join(endings)})" + ("?" if "" in node else "")
