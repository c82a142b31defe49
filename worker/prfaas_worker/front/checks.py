"""The rules that requests of every endpoint are held to: which model, which token ids, how much room."""

from collections.abc import Sequence
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec

from prfaas.errors import RequestError
from prfaas_worker.options import Options

BYTES_PER_TOKEN: Final = 16
"""What a token may take in a body: text has 3 to 6 bytes of it, escaped characters and long runs of spaces up to 12."""
BYTES_BESIDE: Final = 1 << 20
"""What a body may have beside: schemas, tools, and all else."""
MAX_BODY_BYTES: Final = 32 << 20


class Served(msgspec.Struct, frozen=True, kw_only=True):
    """What this worker serves: the names and bounds that requests are checked against."""

    model_name: str
    vocab_size: int
    max_context: int
    max_choices: int

    @property
    def max_body_bytes(self) -> int:
        """The longest body that is read."""
        return min(BYTES_BESIDE + BYTES_PER_TOKEN * self.max_context, MAX_BODY_BYTES)


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


def require_instance(url: str, options: Options, param: str) -> str:
    """Return the address of another instance, inside TLS if we are; empty where there is none.

    Raises:
        RequestError: it is not of the form scheme://host:port.

    """
    if not url:
        return ""
    scheme = "https" if options.tls_dir else "http"
    try:
        parts = urlsplit(url)
        well_formed = parts.scheme == scheme and parts.hostname and parts.port and parts.path in ("", "/")
    except ValueError:
        well_formed = False
    require(bool(well_formed), param, f"is {url!r}; want {scheme}://host:port")
    return url


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
    size = served.vocab_size
    if token_ids and not (set(map(type, token_ids)) == {int} and min(token_ids) >= 0 and max(token_ids) < size):
        wrong = next(entry for entry in token_ids if type(entry) is not int or not 0 <= entry < size)
        raise RequestError(f"{param} holds {wrong!r}: want token ids of 0 to {size - 1}", param=param)
    return token_ids
