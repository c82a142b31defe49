"""The protocol of TensorRT-LLM's trtllm-serve: two legs one after the other, which meet by `disaggregated_params`.

    1. to the prefill instance: the request without a stream, as `context_only`, with an id for both legs
    2. its answer has the first token, the cache's place, and the prompt's token ids
    3. to the decode instance: the request with those params as `generation_only`, and the ids in place of the text

The first token is the prefill instance's, so that leg keeps every field of sampling. If that token ends the answer,
nothing is left to generate: the answer is whole, or as a stream the decode instance computes it alone.

The fields are those of the orchestrator in TensorRT-LLM's published source (tensorrt_llm/serve/
openai_disagg_service.py). Its API refuses unknown ones, so `ctx_usage` goes only to a version that names it.
"""

import secrets
from typing import Any, Final, NamedTuple

import msgspec

from prfaas.errors import UNREADABLE
from prfaas_gateway.engines.shared import Attempt, Leg, LegFailedError, call, check_begun, with_fields
from prfaas_gateway.request import Fields, GatewayRequest
from prfaas_gateway.upstream import Answer, Upstream

GLOBAL_ID: Final = 1 << 62
"""Ids of its own requests are small, ids of an orchestrator large."""
UNFINISHED: Final = (b'"length"', b'"not_finished"')
"""Reasons of an end that is none, as they are written."""
_NULL: Final = b"null"
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])
_choices = msgspec.json.Decoder(list[dict[str, msgspec.Raw]])


class _Prefilled(NamedTuple):
    """A prefill instance's answer, its choice, and the cache's place; members as they are written, of any nesting."""

    document: Fields
    choice: Fields
    params: Fields


class TensorRtLlmEngine:
    def __init__(self, upstream: Upstream):
        self._upstream = upstream

    async def open(self, request: GatewayRequest, attempt: Attempt) -> Answer:
        prefill = attempt.route.prefill
        if prefill is None:
            return await self._decode(request, attempt, request.body)
        fields, request_id = request.every_field, GLOBAL_ID | secrets.randbits(62)
        context = {"request_type": "context_only", "disagg_request_id": request_id}
        kept = {name: value for name, value in fields.items() if name != "stream_options"}
        body = with_fields(kept, {"stream": False, "disaggregated_params": context})
        answer = await call(self._upstream, request, attempt, Leg("prefill", prefill, body))
        if answer.status >= 400:
            return answer  # the request is at fault, and would fail at the other instance too
        answer.close()
        document, choice, params = _read(prefill.name, answer)
        if bytes(choice.get("finish_reason", _NULL)) not in UNFINISHED:
            if bytes(fields.get("stream", b"")) == b"true":
                return await self._decode(request, attempt, request.body)
            answer.body = _whole(document, choice)
            return answer
        added: dict[str, Any] = {"disaggregated_params": {**params, **context, "request_type": "generation_only"}}
        if "ctx_usage" in params:
            added["disaggregated_params"]["ctx_usage"] = document.get("usage")
        token_ids = document.get("prompt_token_ids", _NULL)
        if bytes(token_ids) not in (_NULL, b"[]"):
            added["prompt_token_ids"] = token_ids
        return await self._decode(request, attempt, with_fields(fields, added))

    async def _decode(self, request: GatewayRequest, attempt: Attempt, body: bytes) -> Answer:
        answer = await call(self._upstream, request, attempt, Leg("decode", attempt.route.decode, body))
        return check_begun(answer, with_prefill=attempt.route.prefill is not None)


def _read(name: str, answer: Answer) -> _Prefilled:
    """Return a prefill instance's answer; raise LegFailedError if it does not tell the cache's place."""
    try:
        document = _fields.decode(answer.body or b"")
        choice = _choices.decode(document["choices"])[0]
        return _Prefilled(document, choice, _fields.decode(choice["disaggregated_params"]))
    except (*UNREADABLE, LookupError) as error:
        message = f"{name} gave no disaggregated_params; does it run with a cache_transceiver_config?"
        raise LegFailedError(message, leg="prefill", eject=True) from error


def _whole(document: Fields, choice: Fields) -> bytes:
    """Return an answer that the prefill instance gave alone, without what concerns the hand-off."""
    rest = {name: value for name, value in choice.items() if name != "disaggregated_params"}
    kept = {name: value for name, value in document.items() if name != "prompt_token_ids"}
    return msgspec.json.encode({**kept, "choices": [rest]})
