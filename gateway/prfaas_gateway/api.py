"""The APIs that the gateway relays: which engines serve each, and how its requests are read.

An engine that serves an API may still be unable to hand over caches of its requests: a hand-off needs fields of its own
in the body, and not every API has them. vLLM has them in all of its APIs.
"""

from collections.abc import Callable, Mapping, Set
from typing import Any, Final, NamedTuple

from prfaas.errors import RequestError
from prfaas.kvindex import canonical
from prfaas.kvindex.canonical import Canonical
from prfaas.wire.routes import RoutingTable

VLLM: Final = frozenset({"vllm-prfaas", "vllm-nixl", "vllm-mooncake"})
_EVERY: Final = VLLM | {"prfaas", "sglang", "tensorrt-llm", "dynamo"}


class ApiRoute(NamedTuple):
    path: str
    engines: Set[str]
    """The engines that serve it."""
    hand_over: Set[str]
    """Those of them that can hand over the cache of such a request."""
    canonical: Callable[[Mapping[str, Any]], Canonical | None]
    fields: Set[str]
    """The fields of a body that canonical bytes depend on."""
    answer_limit: str = "max_tokens"
    """The field with the most tokens of an answer."""
    prefills: bool = True
    """Whether the model runs at all."""


_COMPLETION: Final = canonical.canonical_completion, canonical.COMPLETION_FIELDS
_CHAT: Final = canonical.canonical_chat, canonical.CHAT_FIELDS
_RESPONSE: Final = canonical.canonical_response, canonical.RESPONSE_FIELDS
_MESSAGES: Final = canonical.canonical_messages, canonical.MESSAGES_FIELDS
# SGLang's two instances of a request meet by fields that its Messages and Responses APIs lack.
API_ROUTES: Final = {
    route.path: route
    for route in (
        ApiRoute("/v1/chat/completions", _EVERY, _EVERY, *_CHAT),
        ApiRoute("/v1/completions", _EVERY, _EVERY, *_COMPLETION),
        ApiRoute(
            "/v1/responses", VLLM | {"tensorrt-llm", "dynamo"}, VLLM, *_RESPONSE, answer_limit="max_output_tokens"
        ),
        ApiRoute("/v1/messages", VLLM | {"dynamo"}, VLLM, *_MESSAGES),
        ApiRoute("/v1/messages/count_tokens", VLLM | {"sglang", "dynamo"}, VLLM, *_MESSAGES, prefills=False),
    )
}


def not_served_by(route: ApiRoute, table: RoutingTable) -> Set[str]:
    """Return the instances whose engine does not serve an API.

    Raises RequestError with 404 if no decode instance serves it, as such an engine itself would answer.
    """
    missing = {one.name for one in table.instances if one.engine not in route.engines}
    decoding = [one for one in table.instances if one.role == "decode"]
    if decoding and all(one.name in missing for one in decoding):
        engines = {one.engine for one in decoding}
        served = ", ".join(path for path, one in API_ROUTES.items() if engines & one.engines)
        message = f"{' and '.join(sorted(engines))} does not serve POST {route.path} here, but {served}"
        raise RequestError(message, status=404, code="unknown_url")
    return missing
