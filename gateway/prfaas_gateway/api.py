"""The APIs that the gateway relays, and how their requests are read.

An engine's record (`prfaas.engines`) says which of them it serves, and which of their requests another instance may
prefill: a hand-off needs fields of its own in the body, and not every API has them.
"""

from collections.abc import Callable, Mapping, Set
from typing import Any, Final, NamedTuple

import msgspec

from prfaas.engines import ENGINES, EngineRecord
from prfaas.errors import UNREADABLE, RequestError
from prfaas.kvindex import canonical
from prfaas.kvindex.canonical import Canonical
from prfaas.wire.routes import RoutingTable
from prfaas_gateway.openai import RESPONSES_PATH

USUAL_ANSWER_TOKENS: Final = 256
"""Of an answer whose request names no limit."""
MAX_ANSWER_TOKENS: Final = 1 << 20
"""No model's context holds more, so more is no intention: such a debt would last for years."""
TOKEN_BYTES: Final = 2048
"""Of a token in an answer: some 300 with the event around it, twice as many with long names."""
LOGPROB_BYTES: Final = 256
"""Of each of its log probabilities: some 100."""
PROMPT_BYTES: Final = 64
"""Of a byte of the body: an answer may repeat the prompt, and each instance that continues it names the ids again."""
FRAME_BYTES: Final = 1 << 20
"""Of all events without a token: the first and last ones, and signs of life."""


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


class Answers(NamedTuple):
    """The answers that a request asks for."""

    most_tokens: int = 0
    """Of all that are computed, together."""
    computed: int = 1
    returned: int = 1
    """Whose tokens an answer's usage counts."""

    def tokens(self, returned_tokens: int) -> int:
        """Return how many tokens were computed for so many that are returned."""
        return returned_tokens * self.computed // self.returned


def read_answers(route: ApiRoute, fields: Mapping[str, msgspec.Raw], prompts: int) -> Answers:
    """Return the answers that the fields of a body ask for, to so many prompts; an engine refuses what is no number."""
    each = _limit_tokens(route, fields) or USUAL_ANSWER_TOKENS
    returned = prompts * (_count(fields, "n") or 1)
    computed = max(returned, prompts * (_count(fields, "best_of") or 1))
    return Answers(each * computed, computed, returned)


def most_bytes(route: ApiRoute, fields: Mapping[str, msgspec.Raw], prompts: int, body_bytes: int) -> int:
    """Return how many bytes an engine's answer may have: several times what all that the body asks for takes."""
    # An answer of the Responses API has several turns where the server has tools, and the limit is that of each.
    each = 0 if route.path == RESPONSES_PATH else _limit_tokens(route, fields)
    answers = max(1, _count(fields, "n"), _count(fields, "best_of"))
    # vLLM gives those of tokens that a list names, for each token of the answer.
    named = bytes(fields.get("logprob_token_ids", b"")).count(b",")
    logprobs = max(named, *(_count(fields, name) for name in ("logprobs", "top_logprobs", "prompt_logprobs")))
    scores_bytes = logprobs * LOGPROB_BYTES
    new_bytes = prompts * (each or MAX_ANSWER_TOKENS) * (TOKEN_BYTES + scores_bytes)
    return FRAME_BYTES + answers * (new_bytes + body_bytes * (PROMPT_BYTES + scores_bytes))


def _limit_tokens(route: ApiRoute, fields: Mapping[str, msgspec.Raw]) -> int:
    """Return the most tokens of one answer; 0: the body does not limit it."""
    named = max(_count(fields, "max_completion_tokens"), _count(fields, route.answer_limit))
    return min(named, MAX_ANSWER_TOKENS)


def _count(fields: Mapping[str, msgspec.Raw], name: str) -> int:
    """Return a number of one or more, in each form that engines read; 0 if there is none."""
    if name not in fields:
        return 0
    try:
        return max(0, msgspec.json.decode(fields[name], type=int, strict=False))
    except (*UNREADABLE, ValueError):
        return 0


def _serves(engine: EngineRecord, path: str, isolates: bool) -> bool:
    return path in engine.apis and not (isolates and path in engine.unsalted_apis)


def not_served_by(route: ApiRoute, table: RoutingTable, *, isolates: bool) -> Set[str]:
    """Return the instances whose engine does not serve an API to a gateway that `isolates` the caches of clients.

    Raises RequestError with 404 if no decode instance serves it, as such an engine itself would answer.
    """
    missing = {one.name for one in table.instances if not _serves(one.record, route.path, isolates)}
    decoding = [one for one in table.instances if one.role == "decode"]
    if decoding and all(one.name in missing for one in decoding):
        engines = {one.engine for one in decoding}
        records = [ENGINES[name] for name in sorted(engines)]
        served = [path for path in API_ROUTES if any(_serves(one, path, isolates) for one in records)]
        message = f"{' and '.join(sorted(engines))} does not serve POST {route.path} here, but {', '.join(served)}"
        if any(route.path in one.apis for one in records):
            message += ": its requests have no cache_salt, and each client has a cache of its own"
        raise RequestError(message, status=404, code="unknown_url")
    return missing
