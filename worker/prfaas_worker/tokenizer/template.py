"""Chat templates: a conversation to the text that the model was trained on.

Templates are programs that come with a checkpoint, written in Jinja for Hugging Face's renderer: this one has the same
filters, tags and settings, in a sandbox. What a template says of a conversation it cannot render becomes a 400.
"""

import datetime
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from prfaas.errors import ConfigError, RequestError
from prfaas_worker.tokenizer.specials import END_OF_CONTENT

DEFAULT: Final = "default"
FOR_TOOLS: Final = "tool_use"
OWN_VARIABLES: Final = frozenset({"messages", "tools", "add_generation_prompt"})


@dataclass(frozen=True)
class Conversation:
    """What a template is rendered from. `continued`: the last message is unfinished, and the model goes on with it."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()
    variables: Mapping[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True
    continued: bool = False


class ChatTemplate:
    """The templates of one model, by name; most models have one, "default"."""

    def __init__(self, sources: Mapping[str, str], tokens: Mapping[str, str], origin: Path):
        """Compile the templates.

        Args:
            sources: template texts by name.
            tokens: variables such as `bos_token` that templates read.
            origin: the file they came from, for errors.

        Raises:
            ConfigError: a text is no template.

        """
        environment = _environment()
        self.source = "\n".join(sources.values())
        try:
            self._templates = {name: environment.from_string(source) for name, source in sources.items()}
        except jinja2.TemplateError as error:
            raise ConfigError(f"{origin}: not a chat template: {error}") from error
        self._tokens = dict(tokens)

    def render(self, conversation: Conversation, guard: Callable[..., Any]) -> str:
        """Return the text of a conversation whose strings went through `guard`.

        Raises:
            RequestError: the template refuses the conversation.

        """
        messages = [guard(message, visible_too=message["role"] != "assistant") for message in conversation.messages]
        if conversation.continued:
            messages[-1]["content"] = (messages[-1].get("content") or "") + END_OF_CONTENT
        variables = self._tokens | guard(dict(conversation.variables))
        variables["messages"] = messages
        variables["tools"] = guard(list(conversation.tools)) or None
        variables["add_generation_prompt"] = conversation.add_generation_prompt and not conversation.continued
        try:
            text = self._choose(conversation).render(variables)
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            raise RequestError(f"the chat template refuses the messages: {error}", param="messages") from error
        return _before_mark(text) if conversation.continued else text

    def _choose(self, conversation: Conversation) -> jinja2.Template:
        if conversation.tools and FOR_TOOLS in self._templates:
            return self._templates[FOR_TOOLS]
        if DEFAULT not in self._templates:
            names = ", ".join(sorted(self._templates))
            raise RequestError(f"this model's chat templates are {names}, none of them the default", param="messages")
        return self._templates[DEFAULT]


def read_template(directory: Path, config: Mapping[str, Any]) -> ChatTemplate | None:
    """Return the template of a model directory: chat_template.jinja, else tokenizer_config.json's, None without.

    Raises:
        ConfigError: it is no template.

    """
    path = directory / "chat_template.jinja"
    given: Any = path.read_text(encoding="utf-8") if path.is_file() else config.get("chat_template")
    if not given:
        return None
    origin = path if path.is_file() else directory / "tokenizer_config.json"
    try:
        sources = {DEFAULT: given} if isinstance(given, str) else {entry["name"]: entry["template"] for entry in given}
    except (TypeError, KeyError) as error:
        raise ConfigError(f"{origin}: chat_template is neither a text nor a list of named ones: {error!r}") from error
    return ChatTemplate(sources, named_tokens(config), origin)


def named_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Return `bos_token` and the like of tokenizer_config.json, which writes them as text or as an object."""
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
    """The tags generation and endgeneration, which mark the assistant's part for training: here their body alone."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's own convention

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    extensions = [loopcontrols, _Generation]
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = _strftime_now
    environment.filters["tojson"] = _tojson
    return environment


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().astimezone().strftime(form)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Write JSON as it is: Jinja's own filter escapes `<` and `>` for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
