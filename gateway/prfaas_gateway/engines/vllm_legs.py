"""Prepares the requests to vLLM: as the client wrote them, or to go on with an answer that another instance began.

Streams that could go on elsewhere ask for token ids. To go on, the gateway asks the next instance for the text of the
last tokens. vLLM begins wrongly behind a character that is cut in the middle, so the prompt ends before such a one.
"""

import asyncio
from typing import Final, NamedTuple

import msgspec

from prfaas.errors import UNREADABLE, BadInputError, UnreachableError
from prfaas.wire.routes import Instance
from prfaas_gateway.engines.context import read_context
from prfaas_gateway.engines.shared import Attempt, LegFailedError, plain_headers, with_fields
from prfaas_gateway.engines.token_log import TokenLog, can_resume
from prfaas_gateway.engines.vllm_resume import (
    CONTEXT_TOKENS,
    CUT_CHARACTER,
    AnswerWriter,
    SentAnswer,
    continued,
    most_tokens,
    stops_of,
    without_last,
)
from prfaas_gateway.request import Fields, GatewayRequest
from prfaas_gateway.upstream import Upstream

ANSWER_SECONDS: Final = 5.0
CUT_TOKENS: Final = 16
"""At most so many tokens hold a part of a character."""


class VllmCall(NamedTuple):
    """A request to vLLM: every field of it, and the body of a leg that adds none."""

    path: str
    fields: Fields
    body: bytes
    answer_limit: str = "max_tokens"
    """The field that limits the answer's tokens."""


async def prepare(upstream: Upstream, request: GatewayRequest, attempt: Attempt) -> VllmCall:
    """Return the request that serves the client, or continues its broken stream.

    Raises LegFailedError if that instance cannot go on.
    """
    log = attempt.broken
    if isinstance(log, TokenLog) and (answered := log.answered) is not None:
        try:
            return await _go_on(_Asking(upstream, attempt.route.decode, request), log, answered)
        except BadInputError as error:
            log.is_refused = True  # as it would be everywhere
            raise LegFailedError(f"the answer cannot go on: {error}", leg="decode", eject=False) from error
    fields = request.every_field
    if not can_resume(request.path, fields):
        return VllmCall(request.path, fields, request.body, request.api.answer_limit)
    if log is None:
        attempt.log = TokenLog(request.path, fields)
    fields = {**fields, "return_token_ids": msgspec.Raw(b"true")}
    return VllmCall(request.path, fields, with_fields(fields, {}))


class _Asking(NamedTuple):
    """Small questions to the instance that continues."""

    upstream: Upstream
    instance: Instance
    request: GatewayRequest

    async def text(self, token_ids: list[int]) -> str:
        """Return the text of tokens."""
        if not token_ids:
            return ""
        body = msgspec.json.encode({"model": self.request.model, "tokens": token_ids})
        sent = {**plain_headers(self.request), "Content-Type": "application/json"}
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                answer = await self.upstream.post(self.instance, "/detokenize", sent, body)
        except (UnreachableError, TimeoutError) as error:
            raise LegFailedError(str(error), leg="decode", eject=True) from error
        found = answer.body or b""
        answer.close()
        try:
            return msgspec.json.decode(found, type=_Text).prompt
        except UNREADABLE as error:
            message = f"{self.instance.name} does not tell the text of tokens: HTTP {answer.status} to /detokenize"
            raise LegFailedError(message, leg="decode", eject=False) from error

    async def context_tokens(self) -> int:
        """Return the longest prompt and answer of the model."""
        try:
            found = await read_context(self.upstream, self.instance, self.request.model)
        except (UnreachableError, TimeoutError) as error:
            raise LegFailedError(str(error), leg="decode", eject=True) from error
        if found is None:
            message = f"{self.instance.name} does not tell the longest context of {self.request.model}"
            raise LegFailedError(message, leg="decode", eject=False)
        return found


class _Text(msgspec.Struct):
    prompt: str


async def _go_on(asking: _Asking, log: TokenLog, answered: SentAnswer) -> VllmCall:
    """Return the request for the rest of an answer; tell the log. Raises BadInputError if there can be none."""
    cut, text = await _last_text(asking, answered, stops_of(log.fields).seen_characters)
    if cut and log.shows_ids:
        raise BadInputError("the client has the ids of a character that is cut in the middle")
    answered = answered._replace(sent=without_last(answered.sent, cut))
    most = most_tokens(log.fields, is_chat=log.is_chat)
    if most is None:
        most = await asking.context_tokens() - len(answered.prompt_ids)
    fields = continued(log.fields, answered, most - len(answered.sent_ids))
    log.expect_rest(answered.sent, AnswerWriter(answered, log.fields, text))
    return VllmCall("/v1/completions", fields, with_fields(fields, {}))


async def _last_text(asking: _Asking, answered: SentAnswer, seen_characters: int) -> tuple[int, str]:
    """Return how many of the last tokens hold only a part of a character, and the text of those before them.

    The text is at least as long as `seen_characters` if the answer is; empty without stop strings. Raises
    BadInputError if the text of no token is whole.
    """
    sent_ids = answered.sent_ids
    last = sent_ids[-(seen_characters + CUT_TOKENS) :]
    before = (answered.prompt_ids + sent_ids[: len(sent_ids) - len(last)])[-CONTEXT_TOKENS:]
    for cut in range(min(CUT_TOKENS, len(last)) + 1):
        whole = last[: len(last) - cut]
        text = await asking.text(before + whole) if whole else ""
        if not text.endswith(CUT_CHARACTER):
            break
    else:
        raise BadInputError(f"the last {CUT_TOKENS} tokens are no whole characters")
    if not seen_characters or not text:
        return cut, ""
    return cut, text[len(await asking.text(before)) :]
