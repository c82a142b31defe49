"""A stand-in for vLLM whose streams have the form of the real one (vllm_streams.json); its tokens are bytes.

Its model says ANSWER behind PROMPT, wherever a prompt ends. So an answer continues rightly only with the right ids.
Like the real one it repeats the whole prompt if the prompt ends within a character.
"""

import asyncio
import json
from collections.abc import Iterator

from aiohttp import web

PROMPT = "Say it: "
ANSWER = "Über 7 → 8, naïve 漢字 END of it, and so on 😀 for ever."
TOKENS = len(ANSWER.encode())
CUT = "\ufffd"
HEAD = {"created": 1795425279, "model": "m"}
FINGERPRINT = {"system_fingerprint": "vllm-0.32.0-60eab52b"}


def decode(ids: list[int]) -> str:
    return bytes(ids).decode(errors="replace")


def texts(prompt: list[int], new: list[int]) -> Iterator[str]:
    """Yield what each new token adds to the text, as the tokenizers library streams it."""
    known = decode(prompt)
    if known.endswith(CUT):
        known = ""
    for end in range(1, len(new) + 1):
        text = decode(prompt + new[:end])
        if text.endswith(CUT):
            yield ""
        else:
            yield text[len(known) :]
            known = text


class Vllm:
    """A reply for a worker of the tests' world; it dies after byte `dies_at` of its stream."""

    def __init__(self, dies_at: int | None = None, how: str = "resets", parts: int = 1):
        self.dies_at = dies_at
        self.how = how
        self.parts = parts
        """Tokens a chunk."""
        self.requests: list[tuple[str, dict]] = []

    async def __call__(self, request: web.Request, body: bytes) -> web.StreamResponse:
        if request.path == "/v1/models":
            return web.json_response({"object": "list", "data": [{"id": "m", "max_model_len": 4096}]})
        fields = json.loads(body)
        if request.path == "/detokenize":
            return web.json_response({"prompt": decode(fields["tokens"])})
        self.requests.append((request.path, fields))
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        stream = "".join(f"data: {one}\n\n" for one in self.events(request.path, fields)).encode()
        at = self.dies_at
        if at is not None and self.how == "fails":  # a front tells of its engine's death between two events
            at = stream.rfind(b"\n\n", 0, at) + 2 if b"\n\n" in stream[:at] else 0
        await response.write(stream[:at])
        if self.dies_at is not None:
            await self._die(request, response)
        return response

    async def _die(self, request: web.Request, response: web.StreamResponse) -> None:
        if self.how == "fails":  # as a front whose engine died: an error event, and [DONE]
            error = {"message": "EngineCore encountered an issue.", "type": "InternalServerError", "code": 500}
            await response.write(b"data: " + json.dumps({"error": error}).encode() + b"\n\ndata: [DONE]\n\n")
        elif self.how == "stalls":
            await asyncio.Event().wait()
        elif self.how == "resets":
            await asyncio.sleep(0)
            request.transport.close()

    def tokens_behind(self, ids: list[int], limit: int) -> list[int]:
        whole = list((PROMPT + ANSWER).encode())
        assert whole[: len(ids)] == ids, "these are no ids of the prompt and its answer"
        return whole[len(ids) :][:limit]

    def events(self, path: str, fields: dict) -> Iterator[str]:
        is_chat = "chat" in path
        prompt = fields["prompt"] if not is_chat else PROMPT
        ids = list(prompt.encode()) if isinstance(prompt, str) else prompt
        limit = fields.get("max_completion_tokens") or fields.get("max_tokens") or (4096 if is_chat else 16)
        answer = self.tokens_behind(ids, limit)
        ended = "length" if len(answer) == limit else "stop"
        options = fields.get("stream_options") or {}
        usage = {"prompt_tokens": len(ids), "total_tokens": 0, "completion_tokens": 0}
        form = _Form(is_chat, bool(fields.get("return_token_ids")), bool(options.get("continuous_usage_stats")))
        if is_chat:
            yield form.role(ids, usage)
        for new, text, reason, stop in self._chunks(fields, ids, answer, ended):
            usage["completion_tokens"] += len(new)
            usage["total_tokens"] = usage["prompt_tokens"] + usage["completion_tokens"]
            last = FINGERPRINT if reason and not options.get("include_usage") else {}
            yield form.chunk((ids, new), text, (reason, stop), usage, last)
            if reason:
                break
        if options.get("include_usage"):
            yield form.dump([], {"usage": usage} | FINGERPRINT)
        yield "[DONE]"

    def _chunks(self, fields: dict, ids: list[int], answer: list[int], ended: str) -> Iterator[tuple]:
        """Yield tokens, their text, why they are the last ones, and the stop string."""
        stops, included = fields.get("stop") or [], fields.get("include_stop_str_in_output")
        stops = [stops] if isinstance(stops, str) else stops
        held = 0 if included else max(map(len, stops), default=1) - 1
        text, sent, new = "", 0, []
        for number, (token, piece) in enumerate(zip(answer, texts(ids, answer), strict=True), 1):
            text += piece
            new.append(token)
            is_last = number == len(answer)
            if stop := next((one for one in stops if one in text), None):
                end = text.index(stop) + (len(stop) if included else 0)
                yield new, text[sent:end], "stop", stop
                return
            if number % self.parts and not is_last:
                continue
            end = len(text) if is_last else max(sent, len(text) - held)
            yield new, text[sent:end], ended if is_last else None, None
            sent, new = end, []


class _Form:
    """The form of one stream's events."""

    def __init__(self, is_chat: bool, shows_ids: bool, counts: bool):
        self.is_chat, self.shows_ids, self.counts = is_chat, shows_ids, counts
        self._is_first = True

    def dump(self, choices: list, more: dict) -> str:
        names = ("chatcmpl-r-1", "chat.completion.chunk") if self.is_chat else ("cmpl-r-1", "text_completion")
        chunk = dict(zip(("id", "object"), names, strict=True)) | HEAD | {"choices": choices} | more
        return json.dumps(chunk, separators=(",", ":"), ensure_ascii=False)

    def role(self, prompt: list[int], usage: dict) -> str:
        choice = {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        usage = usage | {"total_tokens": usage["prompt_tokens"]}
        ids = {"prompt_token_ids": prompt if self.shows_ids else None, "prompt_text": None}
        return self.dump([choice], self._counted(usage) | ids)

    def chunk(self, ids: tuple, text: str, end: tuple, usage: dict, last: dict) -> str:
        (prompt, new), (reason, stop) = ids, end
        shown = {"token_ids": new if self.shows_ids else None}
        if self.is_chat:
            choice = {"index": 0, "delta": {"content": text}, "logprobs": None, "finish_reason": reason}
            choice |= ({"stop_reason": stop} if reason else {}) | shown
        else:
            choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": reason, "stop_reason": stop}
            shows_prompt = self.shows_ids and self._is_first
            choice |= {"prompt_token_ids": prompt if shows_prompt else None} | shown
        self._is_first = False
        return self.dump([choice], last | self._counted(usage))

    def _counted(self, usage: dict) -> dict:
        if not self.counts:
            return {}
        return {"usage": usage | ({"completion_tokens_details": None} if self.is_chat else {})}
