"""Chat templates and special tokens: a conversation to the text and tokens that the model was trained on.

Templates are programs that come with a checkpoint, written in Jinja for Hugging Face's renderer. `ChatTemplate` has the
same filters, tags and settings, in a sandbox; transformers' would load torch. A template's refusal becomes a 400.

Special tokens come only from the template. Users' strings are *guarded* before the template sees them. U+FDD0, a
character that no text may hold, is put in front of every place where a special token's letters begin. The split of the
rendered text then finds only the template's own tokens, and takes the guards out again.
"""

import datetime
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from prfaas.errors import ConfigError, RequestError
from prfaas_worker.tokenizer.history import past_of, to_json

OWN_VARIABLES: Final = frozenset({"messages", "tools", "add_generation_prompt"})
GUARD: Final = "\ufdd0"
END_OF_CONTENT: Final = "\ufdd1"  # Marks, while a template renders, the end of the content that the model continues.
_REFUSALS: Final = (
    *(jinja2.TemplateError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError),
    *(RuntimeError, MemoryError),  # of macros that call themselves, and of texts that are multiplied
)
"""What a template raises for what it cannot render."""
_RESERVED: Final = re.compile(f"[{GUARD}{END_OF_CONTENT}]")


@dataclass(frozen=True)
class Conversation:
    """A template's input. `continued`: the last message is unfinished, and the model continues it."""

    messages: Sequence[Mapping[str, Any]]
    variables: Mapping[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True
    continued: bool = False


class ChatTemplate:
    """The template of one model."""

    def __init__(self, source: str, tokens: Mapping[str, str], origin: Path):
        """Compile a template; `tokens` are variables like `bos_token`. Raises ConfigError if it is invalid."""
        try:
            self._template = _environment().from_string(source)
        except (*_REFUSALS, SyntaxError) as error:  # the latter two for what is nested too deeply for Python
            raise ConfigError(f"{origin}: not a chat template: {error}") from error
        self._tokens = dict(tokens)
        self._past = past_of(self._try)

    def _try(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """Return the text of a sample; empty if the template refuses it."""
        try:
            return self._render({"messages": messages, "add_generation_prompt": True})
        except _REFUSALS:
            return ""

    def _render(self, variables: Mapping[str, Any]) -> str:
        return self._template.render({**self._tokens, "tools": None, **variables})  # templates ask for tools

    def render(self, conversation: Conversation, guard: Callable[..., Any]) -> str:
        """Return the text of a guarded conversation. Raises RequestError if the template refuses it."""
        fitted = [self._past.fit(message) for message in conversation.messages]
        messages = [guard(message, visible_too=message["role"] != "assistant") for message in fitted]
        if conversation.continued:
            messages[-1]["content"] = (messages[-1].get("content") or "") + END_OF_CONTENT
        variables = guard(dict(conversation.variables))
        variables["messages"] = messages
        variables["add_generation_prompt"] = conversation.add_generation_prompt and not conversation.continued
        try:
            text = self._render(variables)
        except _REFUSALS as error:
            raise RequestError(f"the chat template refuses the messages: {error}", param="messages") from error
        return _before_mark(text) if conversation.continued else text


def read_template(directory: Path, config: Mapping[str, Any]) -> ChatTemplate | None:
    """Return the template of chat_template.jinja, else of tokenizer_config.json, where it may be the "default" of
    several. Raises ConfigError if invalid."""
    path = directory / "chat_template.jinja"
    given: Any = path.read_text(encoding="utf-8") if path.is_file() else config.get("chat_template")
    origin = path if path.is_file() else directory / "tokenizer_config.json"
    if given and not isinstance(given, str):
        try:
            given = {entry["name"]: entry["template"] for entry in given}.get("default")
        except (TypeError, KeyError) as error:
            text = f"{origin}: chat_template is neither a text nor a list of named ones: {error!r}"
            raise ConfigError(text) from error
    return ChatTemplate(given, named_tokens(config), origin) if given else None


def named_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Return `bos_token` and the like of tokenizer_config.json, which holds them as text or as an object."""
    found = {}
    for name, value in config.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            found[name] = text
    return found


def _before_mark(text: str) -> str:
    before, mark, _ = text.rpartition(END_OF_CONTENT)
    if not mark:
        raise RequestError(
            "the chat template does not render the last message's content, so that it cannot be continued",
            param="continue_final_message",
        )
    return before


class _Generation(Extension):
    """Renders the body of the tags generation and endgeneration, which mark the assistant's part for training."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's own convention

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    extensions = [loopcontrols, _Generation]
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = _strftime_now
    environment.filters["tojson"] = to_json
    return environment


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().astimezone().strftime(form)


class Special(NamedTuple):
    """One special token. A hidden one adds nothing to the text; `strips_*` take the spaces beside it away. A plain one
    is no mark but text that users may write, such as a run of spaces: it is split off everywhere."""

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
        """Return JSON-like `value` with all strings guarded, keys included; with `visible_too` also the letters of
        tokens that answers show, which the assistant's words may hold. Raises RequestError for a marker in a string."""
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
        """Split a plain prompt likewise; only plain special tokens differ from letters."""
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
    """Yield the spans of special tokens. A look-behind in the pattern would slow the search tenfold."""
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
    """Return a pattern for the longest of `texts`; it never matches without any. Common beginnings are factored out:
    otherwise each of a thousand alternatives is tried at every "<" of an HTML page."""
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
