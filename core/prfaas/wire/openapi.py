"""OpenAPI documents of prfaas's HTTP interfaces: the gateway's endpoint, and a worker's Prefill-as-a-Service API.

Bodies of the prefill API are generated from their types in prefill.py. A gateway relays bodies unchanged and reads only
`model`. So its document lists the most used fields and allows all others. The written copies are docs/openapi/*.json.
"""

from typing import Any, Final

import msgspec

from prfaas.wire import headers
from prfaas.wire.preferences import MAX_DEADLINE_SECONDS, MIN_DEADLINE_SECONDS
from prfaas.wire.prefill import PrefillOffer, PrefillRequest

Document = dict[str, Any]
API_VERSION: Final = "1.0.0"
"""Of both documents. Fields may be added within a version; paths begin with the first number of it."""

_ERROR: Final[Document] = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": "string"},
            },
        }
    },
}
_ANSWER_HEADERS: Final = {
    headers.REQUEST_ID: "The client's own, or a new one",
    headers.DECISION: "offload or local",
    headers.OUTCOME: "ok, or fallback: the offload failed and the hub prefilled",
    headers.THRESHOLD_TOKENS: "The threshold that decided about the request",
    headers.PREFILL_CLUSTER: "Where it was prefilled",
    headers.PREFILL_INSTANCE: "By whom",
    headers.DECODE_INSTANCE: "Who decoded",
    headers.PROMPT_TOKENS: "Tokens of the prompt",
    headers.CACHED_TOKENS: "How many of them were cached",
}
_REQUEST_HEADERS: Final[dict[str, Document]] = {
    headers.DATACENTERS: {
        "type": "string",
        "maxLength": 4096,
        "pattern": "^(prefer|forbid) [^;]+(; ?(prefer|forbid) [^;]+)?$",
        "example": "prefer eu-west, eu-north; forbid us",
    },
    headers.OFFLOAD: {"type": "string", "enum": ["auto", "never", "always"]},
    headers.DEADLINE_SECONDS: {"type": "number", "minimum": MIN_DEADLINE_SECONDS, "maximum": MAX_DEADLINE_SECONDS},
    headers.REQUEST_ID: {"type": "string", "pattern": "^[A-Za-z0-9._:/+=-]{1,128}$"},
}
_COMMON_FIELDS: Final[Document] = {
    "model": {"type": "string"},
    "max_tokens": {"type": ["integer", "null"], "minimum": 1},
    "temperature": {"type": ["number", "null"], "minimum": 0},
    "stream": {"type": ["boolean", "null"]},
    "stream_options": {"type": ["object", "null"], "properties": {"include_usage": {"type": "boolean"}}},
}
_TOKENS: Final[Document] = {"type": "array", "items": {"type": "integer", "minimum": 0}}
_PROMPT: Final[Document] = {
    "oneOf": [
        {"type": "string"},
        _TOKENS,
        {"type": "array", "items": {"type": "string"}},
        {"type": "array", "items": _TOKENS},
    ]
}
_MESSAGES: Final[Document] = {
    "type": "array",
    "items": {"type": "object", "required": ["role"], "properties": {"role": {"type": "string"}}},
}


_INPUT: Final[Document] = {"oneOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}]}
_WHERE_SERVED: Final = "Where the engine of the instances serves it; else the answer is a 404"


def gateway() -> Document:
    """Return the document of a gateway."""
    refusals = {
        "400": "The body or a header is not valid",
        "401": "No API key, or an unknown one",
        "404": "The model is not served here",
        "413": "The body is too long",
        "415": "The body has an encoding that is not served",
        "429": "A limit of the key is reached, or every instance is full; Retry-After says when to come again",
        "502": "A worker's own failure",
        "503": "Nothing can serve now; Retry-After says when to come again",
        "504": "The request's deadline has passed",
    }
    parameters = [{"name": name, "in": "header", "schema": schema} for name, schema in _REQUEST_HEADERS.items()]

    def generating(operation: str, prompt: Document, described: str = "") -> Document:
        body = {"type": "object", "required": ["model", *prompt], "properties": {**_COMMON_FIELDS, **prompt}}
        answer = {**_json({"type": "object"}), "text/event-stream": {"schema": {"type": "string"}}}
        answer_headers = {
            name: {"description": text, "schema": {"type": "string"}} for name, text in _ANSWER_HEADERS.items()
        }
        served = {
            "200": {"description": "The answer, whole or as a stream", "headers": answer_headers, "content": answer}
        }
        return {
            "operationId": operation,
            **({"description": described} if described else {}),
            "parameters": parameters,
            "requestBody": {"required": True, "content": _json(body)},
            "responses": served | _refusals(refusals),
        }

    def listing(operation: str, codes: tuple[str, ...]) -> Document:
        served = {"200": {"description": "What is served", "content": _json({"type": "object"})}}
        return {"operationId": operation, "responses": served | _refusals({code: refusals[code] for code in codes})}

    def tokens(operation: str, given: Document) -> Document:
        body = {"type": "object", "required": ["model"], "properties": {"model": {"type": "string"}, **given}}
        served = {"200": {"description": "As the engine answers", "content": _json({"type": "object"})}}
        return {
            "operationId": operation,
            "description": _WHERE_SERVED,
            "requestBody": {"required": True, "content": _json(body)},
            "responses": served | _refusals(refusals),
        }

    model = {"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}
    return _document(
        "prfaas gateway",
        {
            "/v1/chat/completions": {"post": generating("chat", {"messages": _MESSAGES})},
            "/v1/completions": {"post": generating("complete", {"prompt": _PROMPT})},
            "/v1/responses": {"post": generating("respond", {"input": _INPUT}, _WHERE_SERVED)},
            "/v1/messages": {"post": generating("message", {"messages": _MESSAGES}, _WHERE_SERVED)},
            "/v1/messages/count_tokens": {"post": generating("countTokens", {"messages": _MESSAGES}, _WHERE_SERVED)},
            "/tokenize": {"post": tokens("tokenize", {"prompt": {"type": "string"}, "messages": _MESSAGES})},
            "/detokenize": {"post": tokens("detokenize", {"tokens": _TOKENS})},
            "/v1/models": {"get": listing("models", ("401",))},
            "/v1/models/{model}": {"get": {**listing("model", ("401", "404")), "parameters": [model]}},
        },
        {},
        {"apiKey": {"type": "http", "scheme": "bearer"}},
    )


def prefill() -> Document:
    """Return the document of a worker's Prefill-as-a-Service API."""
    schemas = msgspec.json.schema_components(
        [PrefillRequest, PrefillOffer], ref_template="#/components/schemas/{name}"
    )[1]
    refusals = {
        "400": "The body is not valid, or asks for what no prompt of this model can be",
        "401": "The caller has no certificate of this installation",
        "403": "The caller's certificate is not the hub's",
        "404": "The model is not served here",
        "409": "A transfer of this name is open here",
        "413": "The body is too long",
        "503": "This instance is full, or ends; another one may serve",
    }

    begun = {
        "description": "The cache is offered. The body comes at once, and ends when all is computed; closing cancels",
        "content": _json(_ref("PrefillOffer")),
    }
    return _document(
        "prfaas Prefill-as-a-Service",
        {
            "/v1/prefills": {
                "post": {
                    "operationId": "createPrefill",
                    "requestBody": {"required": True, "content": _json(_ref("PrefillRequest"))},
                    "responses": {"201": begun} | _refusals(refusals),
                }
            }
        },
        schemas,
        {"clusterCertificate": {"type": "mutualTLS"}},
    )


def _document(title: str, paths: Document, schemas: Document, security: Document) -> Document:
    return {
        "openapi": "3.1.0",
        "info": {"title": title, "version": API_VERSION, "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"}},
        "paths": paths,
        # Either, depending on the installation: with keys or certificates, or open.
        "security": [{name: []} for name in security] + [{}],
        "components": {"schemas": {"Error": _ERROR, **schemas}, "securitySchemes": security},
    }


def _refusals(texts: dict[str, str]) -> Document:
    return {code: {"description": text, "content": _json(_ref("Error"))} for code, text in texts.items()}


def _json(schema: Document) -> Document:
    return {"application/json": {"schema": schema}}


def _ref(name: str) -> Document:
    return {"$ref": f"#/components/schemas/{name}"}
