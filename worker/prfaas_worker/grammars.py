"""Translates grammars for llguidance, and checks them: the front refuses bad ones, the engine compiles good ones.

It needs neither torch nor a tokenizer. Whether a schema, a regular expression or a Lark grammar is valid does not
depend on the model. A grammar refused here costs no queue slot and no prefill.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Final, TypeVar

import msgspec

from prfaas.errors import RequestError
from prfaas.wire.engine import Grammar

MAX_GRAMMAR_BYTES: Final = 512 << 10  # Compiling takes up to a second per 100 KB of schema.
# JSON allows any number of spaces anywhere, and a small model that may write them does so until its tokens are spent:
# what writers of JSON use is none, one, or a new line with its indentation.
_SPACES: Final[dict[str, Any]] = {"x-guidance": {"whitespace_pattern": r"( |\n {0,16})?"}}
STACK_BYTES: Final = 512 << 20
"""The library follows references by recursion, and a usual stack ends before the library's own limits. Only what is
used of it takes memory, 190 MB at most."""
SHORT_BYTES: Final = 8 << 10  # Too few for references that a usual stack cannot follow.
_stack_size: Final = threading.Lock()
_PARAMS: Final = {"json_schema": "response_format", "regex": "guided_regex", "lark": "guided_grammar"}


def llguidance_text(grammar: Grammar) -> str:
    """Return the grammar in llguidance's own language; does not check it. Spaces between JSON values are bounded,
    unless the schema sets the library's options itself."""
    # Imported here: a front that never sees a grammar does not pay for the library.
    from llguidance import LLMatcher

    match grammar.kind:
        case "json_schema":
            return LLMatcher.grammar_from_json_schema(_bounded(grammar.text))
        case "regex":
            return LLMatcher.grammar_from_regex(grammar.text)
        case "lark":
            return LLMatcher.grammar_from_lark(grammar.text)


def lark_of_schema(schema: str) -> str:
    """Return a JSON schema as a term of a Lark grammar, with the same bounds on spaces."""
    return f"%json {_bounded(schema)}"


_Result = TypeVar("_Result")


def with_deep_stack(grammar: Grammar, work: Callable[[], _Result]) -> _Result:
    """Return the result of the library's work on a grammar, which may need a deeper stack than a thread has."""
    if len(grammar.text) <= SHORT_BYTES:
        return work()
    future: Future[_Result] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # a panic of the library's is no Exception
            future.set_exception(error)

    thread = threading.Thread(target=run, name="deep-grammar", daemon=True)
    with _stack_size:
        usual_bytes = threading.stack_size(STACK_BYTES)
        try:
            thread.start()
        finally:
            threading.stack_size(usual_bytes)
    return future.result()


def check_grammar(grammar: Grammar) -> None:
    """Raise RequestError for a grammar that is too long, invalid, unsupported, or matches nothing. Takes milliseconds,
    for the largest schemas seconds, mostly without the interpreter lock: call it in a thread."""
    from llguidance import LLMatcher

    if (size := len(grammar.text.encode(errors="replace"))) > MAX_GRAMMAR_BYTES:
        raise refusal(grammar, f"it has {size} bytes, more than the {MAX_GRAMMAR_BYTES} allowed")
    text = llguidance_text(grammar)
    is_error, messages = with_deep_stack(grammar, lambda: LLMatcher.validate_grammar_with_warnings(text))
    if is_error:
        raise refusal(grammar, messages[0])


def refusal(grammar: Grammar, reason: str) -> RequestError:
    """Return the error that names the grammar's field."""
    kind = grammar.kind.replace("_", " ")
    return RequestError(f"the {kind} cannot be used: {reason.strip()}", param=_PARAMS[grammar.kind])


def _bounded(schema: str) -> str:
    """Return a schema with bounded spaces; leave anything but a JSON object to the check."""
    try:
        parts = msgspec.json.decode(schema, type=dict[str, msgspec.Raw])
    except (msgspec.MsgspecError, UnicodeEncodeError):
        return schema
    return msgspec.json.encode(_SPACES | parts).decode()
