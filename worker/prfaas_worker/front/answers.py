"""The OpenAI API's answers: whole bodies and stream chunks of both endpoints, as plain dictionaries."""

import time
from collections.abc import Sequence
from typing import Any

from prfaas.wire.engine import TokenLogprob
from prfaas_worker.tokenizer import Tokenizer


class Answers:
    """Builds what is sent back for one request."""

    def __init__(self, *, chat: bool, request_id: str, model: str, tokenizer: Tokenizer):
        self._chat = chat
        self._tokenizer = tokenizer
        prefix = "chatcmpl" if chat else "cmpl"
        self._head = {"id": f"{prefix}-{request_id}", "created": int(time.time()), "model": model}

    def whole(self, choices: Sequence[dict[str, Any]], usage: dict[str, Any]) -> dict[str, Any]:
        """Return the body of an answer that is not streamed."""
        kind = "chat.completion" if self._chat else "text_completion"
        return self._head | {"object": kind, "choices": list(choices), "usage": usage}

    def whole_choice(self, index: int, text: str, reason: str, logprobs: dict[str, Any] | None) -> dict[str, Any]:
        """Return one choice of such a body."""
        content = {"message": {"role": "assistant", "content": text}} if self._chat else {"text": text}
        return {"index": index, **content, "finish_reason": reason, "logprobs": logprobs}

    def chunk(self, choices: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Return one chunk of a stream."""
        kind = "chat.completion.chunk" if self._chat else "text_completion"
        return self._head | {"object": kind, "choices": list(choices)}

    def piece(
        self, index: int, text: str, reason: str | None, logprobs: dict[str, Any] | None, *, first: bool
    ) -> dict[str, Any]:
        """Return one choice's part of a chunk; the first of a chat says whose turn it is."""
        if not self._chat:
            return {"index": index, "text": text, "finish_reason": reason, "logprobs": logprobs}
        delta = {"role": "assistant", "content": text} if first else {"content": text} if text else {}
        return {"index": index, "delta": delta, "finish_reason": reason, "logprobs": logprobs}

    def logprobs(self, token_ids: Sequence[int], found: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        """Return log probabilities in the endpoint's form, None where none were asked for."""
        if not found:
            return None
        pairs = list(zip(token_ids, found, strict=True))
        if self._chat:
            return {
                "content": [
                    self._named(token, entry.logprob)
                    | {"top_logprobs": [self._named(other, logprob) for other, logprob in entry.top]}
                    for token, entry in pairs
                ]
            }
        return {
            "tokens": [self._name(token) for token, _ in pairs],
            "token_logprobs": [entry.logprob for _, entry in pairs],
            "top_logprobs": [{self._name(other): logprob for other, logprob in entry.top} for _, entry in pairs],
        }

    def _named(self, token: int, logprob: float) -> dict[str, Any]:
        return {
            "token": self._name(token),
            "logprob": logprob,
            "bytes": list(self._tokenizer.token_bytes(token)),
        }

    def _name(self, token: int) -> str:
        """A token's text, or as the OpenAI API writes it, its bytes where they are no text by themselves."""
        data = self._tokenizer.token_bytes(token)
        try:
            return data.decode() if data else f"token_id:{token}"
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def usage_body(prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> dict[str, Any]:
    """Return the usage object of a request."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


def error_body(message: str, *, status: int, code: str, param: str | None = None) -> dict[str, Any]:
    """Return an OpenAI-style error."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
