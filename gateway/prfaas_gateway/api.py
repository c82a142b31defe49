"""The APIs that the gateway relays, and how their requests are read.

An engine's record (`prfaas.engines`) says which of them it serves, and which of their requests another instance may
prefill: a hand-off needs fields of its own in the body, and not every API has them.
"""

from collections.abc import Callable, Mapping, Set
from typing import Any, Final, NamedTuple

from prfaas.engines import ENGINES
from prfaas.errors import RequestError
from prfaas.kvindex import canonical
from prfaas.kvindex.canonical import Canonical
from prfaas.wire.routes import RoutingTable


class ApiRoute(NamedTuple):
    path: str
    canonical: Callable[[Mapping[str, Any]], Canonical | None]
    fields: Set[str]
    """The fields of a body that canonical bytes depend on."""
    answer_limit: str = "max_tokens"
    """The field with the most tokens of an answer."""
    prefills: bool = True
    """Whether the model runs at all."""


def _unmatched(_body: Mapping[str, Any]) -> None:
    """Return no canonical bytes: the request reaches no model."""


_COMPLETION: Final = canonical.canonical_completion, canonical.COMPLETION_FIELDS
_CHAT: Final = canonical.canonical_chat, canonical.CHAT_FIELDS
_RESPONSE: Final = canonical.canonical_response, canonical.RESPONSE_FIELDS
_MESSAGES: Final = canonical.canonical_messages, canonical.MESSAGES_FIELDS
API_ROUTES: Final = {
    route.path: route
    for route in (
        ApiRoute("/v1/chat/completions", *_CHAT),
        ApiRoute("/v1/completions", *_COMPLETION),
        ApiRoute("/v1/responses", *_RESPONSE, answer_limit="max_output_tokens"),
        ApiRoute("/v1/messages", *_MESSAGES),
        ApiRoute("/v1/messages/count_tokens", *_MESSAGES, prefills=False),
        ApiRoute("/tokenize", _unmatched, frozenset(), prefills=False),
        ApiRoute("/detokenize", _unmatched, frozenset(), prefills=False),
    )
}


def not_served_by(route: ApiRoute, table: RoutingTable) -> Set[str]:
    """Return the instances whose engine does not serve an API.

    Raises RequestError with 404 if no decode instance serves it, as such an engine itself would answer.
    """
    missing = {one.name for one in table.instances if route.path not in one.record.apis}
    decoding = [one for one in table.instances if one.role == "decode"]
    if decoding and all(one.name in missing for one in decoding):
        engines = {one.engine for one in decoding}
        served = ", ".join(path for path in API_ROUTES if any(path in ENGINES[name].apis for name in engines))
        message = f"{' and '.join(sorted(engines))} does not serve POST {route.path} here, but {served}"
        raise RequestError(message, status=404, code="unknown_url")
    return missing
