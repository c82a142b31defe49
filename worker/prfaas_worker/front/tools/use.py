"""Checks the tools of a chat request, and turns them into a parser of its answers and a grammar for them."""

import re
from typing import Annotated, Any, Final, NamedTuple

import msgspec
from msgspec import Meta

from prfaas.errors import RequestError
from prfaas.wire.engine import Grammar
from prfaas_worker.front.openai_bodies import ChatBody
from prfaas_worker.front.serving import require, unsupported
from prfaas_worker.front.tools.base import Function
from prfaas_worker.front.tools.formats import MOST_CALLS, ToolFormat, calls_grammar, free_grammar, tool_format
from prfaas_worker.grammars import lark_of_schema
from prfaas_worker.tokenizer import Tokenizer

MAX_TOOLS: Final = 128
_TAKES_TEXT: Final = re.compile(r"arguments\W{0,3}\s+is\s+string")


class _FunctionBody(msgspec.Struct, frozen=True):
    name: Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.-]{1,64}\Z")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class _ToolBody(msgspec.Struct, frozen=True, tag_field="type", tag="function"):
    function: _FunctionBody


class _NamedFunction(msgspec.Struct, frozen=True):
    name: str


class _NamedChoice(msgspec.Struct, frozen=True, tag_field="type", tag="function"):
    function: _NamedFunction


class ToolUse(NamedTuple):
    """Reads calls from the answers of one request. `lark` is empty if any text may be the answer."""

    format: ToolFormat
    parallel: bool
    lark: str


def tool_use(body: ChatBody, tokenizer: Tokenizer) -> ToolUse | None:
    """Return the use of tools in the answers. Raises RequestError if tools or choice are invalid or not served."""
    tools = _tools(body)
    choice = _choice(body, [tool.name for tool in tools])
    if not tools or choice == "none":
        return None
    known = tool_format(tokenizer.template_source)
    if known is None:
        raise unsupported("tools", "this model's chat template has no known format of tool calls")
    parallel = body.parallel_tool_calls is not False
    if isinstance(choice, _NamedChoice):
        tools, parallel = [tool for tool in tools if tool.name == choice.function.name], False
    use = ToolUse(known, parallel, "")
    parts = _grammar_parts(use, tools, tokenizer)
    if choice != "auto":
        return use._replace(lark=f"start: calls\n{calls_grammar(*parts)}")
    if any(tool.strict for tool in tools):
        return use._replace(lark=free_grammar(*parts))
    return use


def with_answer(use: ToolUse, body: ChatBody, answer: Grammar | None, tokenizer: Tokenizer) -> Grammar | None:
    """Return the grammar of a request that offers tools and may constrain the answer too. Raises RequestError if calls
    are required and the answer is constrained too, or both use languages that do not mix."""
    if answer is None:
        return Grammar("lark", use.lark) if use.lark else None
    if body.tool_choice not in (None, "auto") or answer.kind != "json_schema":
        raise RequestError(
            "the answer cannot be both: tool_choice demands calls, or the grammar is no JSON schema, and only that can "
            "be combined with tools; leave one out",
            param="tool_choice",
        )
    rules = calls_grammar(*_grammar_parts(use, _tools(body), tokenizer))
    return Grammar("lark", f"start: answer | calls\nanswer: {lark_of_schema(answer.text)}\n{rules}")


def hidden_marks(use: ToolUse | None, tokenizer: Tokenizer) -> dict[int, bytes]:
    """Return the special tokens without text that mark calls: the parser needs them in the text."""
    return {token: text.encode() for text, token in _tokens(use, tokenizer).items()} if use else {}


def _grammar_parts(
    use: ToolUse, tools: list[_FunctionBody], tokenizer: Tokenizer
) -> tuple[ToolFormat, list[Function], dict[str, int], int]:
    functions = [Function(tool.name, tool.parameters or {}) for tool in tools]
    return use.format, functions, _tokens(use, tokenizer), MOST_CALLS if use.parallel else 1


def _tokens(use: ToolUse, tokenizer: Tokenizer) -> dict[str, int]:
    """Return the format's marks that are special tokens."""
    specials = tokenizer.specials
    return {
        mark: specials[mark]
        for mark in use.format.marks
        if mark in specials and not tokenizer.token_bytes(specials[mark])
    }


def template_arguments(arguments: str, tokenizer: Tokenizer) -> str | dict[str, Any]:
    """Return a past call's arguments in the template's form. Text, if the template takes it, keeps the generated
    tokens, so the cached prefix matches. Raises RequestError if they are no JSON object."""
    try:
        found = msgspec.json.decode(arguments or "{}", type=dict[str, Any])
    except msgspec.MsgspecError as error:
        raise RequestError(f"tool_calls.function.arguments is no JSON object: {error}", param="messages") from error
    return arguments if arguments and _TAKES_TEXT.search(tokenizer.template_source) else found


def _tools(body: ChatBody) -> list[_FunctionBody]:
    given = body.tools or []
    require(len(given) <= MAX_TOOLS, "tools", f"may hold at most {MAX_TOOLS} functions")
    try:
        tools = [tool.function for tool in msgspec.convert(given, list[_ToolBody])]
    except msgspec.ValidationError as error:
        raise RequestError(f"tools: {error}", param="tools") from error
    require(len({tool.name for tool in tools}) == len(tools), "tools", "names a function twice")
    return tools


def _choice(body: ChatBody, names: list[str]) -> str | _NamedChoice:
    choice = body.tool_choice
    if isinstance(choice, dict):
        try:
            named = msgspec.convert(choice, _NamedChoice)
        except msgspec.ValidationError as error:
            raise RequestError(f"tool_choice: {error}", param="tool_choice") from error
        require(named.function.name in names, "tool_choice", f"names {named.function.name!r}, which is not in tools")
        return named
    require(
        choice in (None, "none", "auto", "required"),
        "tool_choice",
        "must be 'none', 'auto', 'required' or the name of a function",
    )
    require(choice != "required" or bool(names), "tool_choice", "is 'required' and there are no tools")
    return choice or "auto"
