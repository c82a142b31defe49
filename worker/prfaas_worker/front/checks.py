"""The rules that requests of every endpoint are held to: which model, which token ids, how much room."""

from collections.abc import Sequence
from typing import Any

import msgspec

from prfaas.errors import RequestError


class Served(msgspec.Struct, frozen=True, kw_only=True):
    """What this worker serves: the names and bounds that requests are checked against."""

    model_name: str
    vocab_size: int
    max_context: int
    max_choices: int


def require(held: bool, param: str, rule: str) -> None:
    """Raise a RequestError that says `param` and the rule it broke, unless it held."""
    if not held:
        raise RequestError(f"{param} {rule}", param=param)


def unsupported(param: str, message: str) -> RequestError:
    """Return the error of a request for something that is not served."""
    return RequestError(message, code="unsupported_parameter", param=param)


def require_model(model: str, served: Served) -> None:
    """Raise RequestError unless `model` is the one served here."""
    if model == served.model_name:
        return
    if model.startswith(f"{served.model_name}:"):
        raise unsupported("model", f"model {model!r} names a LoRA adapter, and adapters are not served here")
    raise RequestError(
        f"model {model!r} is not served here; this instance serves {served.model_name!r}",
        status=404,
        code="model_not_found",
        param="model",
    )


def require_room(token_ids: Sequence[int], served: Served) -> int:
    """Return how many tokens may follow a prompt.

    Raises:
        RequestError: the prompt is empty, or leaves no room for a single token.

    """
    require(bool(token_ids), "prompt", "must have at least one token")
    room = served.max_context - len(token_ids)
    if room < 1:
        raise RequestError(
            f"the prompt has {len(token_ids)} tokens, the context {served.max_context} and one token must be free; "
            "shorten the prompt",
            code="context_length_exceeded",
            param="prompt",
        )
    return room


def require_tokens(token_ids: list[Any], served: Served, param: str = "prompt") -> list[int]:
    """Return a list that holds token ids of this model and nothing else.

    Raises:
        RequestError: an entry is no integer or outside of the vocabulary.

    """
    for entry in token_ids:
        if type(entry) is not int or not 0 <= entry < served.vocab_size:
            raise RequestError(f"{param} holds {entry!r}: want token ids of 0 to {served.vocab_size - 1}", param=param)
    return token_ids
