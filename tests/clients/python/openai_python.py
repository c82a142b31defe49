"""openai-python, as a program: see tests/clients/programs.py."""

import json
import sys
from collections.abc import Iterator
from typing import Any

from openai import APIStatusError, OpenAI, OpenAIError
from openai.lib.streaming.chat import ChatCompletionStreamState


def say(line: dict[str, Any]) -> None:
    print(json.dumps(line), flush=True)


def counted(stream: Any, seen: dict[str, Any]) -> Iterator[Any]:
    """Yield a stream's chunks; say once that it has begun."""
    for chunk in stream:
        if not seen["chunks"]:
            say({"begun": True})
        seen["chunks"] += 1
        yield chunk


def ask_chat(client: OpenAI, body: dict[str, Any], seen: dict[str, Any]) -> Any:
    answer = client.chat.completions.create(**body)
    if body.get("stream"):
        state = ChatCompletionStreamState()
        for chunk in counted(answer, seen):
            state.handle_chunk(chunk)
        answer = state.current_completion_snapshot
    for choice in answer.choices:
        tokens = [one.token for one in (choice.logprobs and choice.logprobs.content) or []]
        shown = {"text": choice.message.content, "tokens": tokens, "finish_reason": choice.finish_reason}
        seen["choices"].append(shown)
    return answer.usage


def ask_completions(client: OpenAI, body: dict[str, Any], seen: dict[str, Any]) -> Any:
    answer = client.completions.create(**body)
    found: dict[int, dict[str, Any]] = {}
    usage = None
    for chunk in counted(answer, seen) if body.get("stream") else [answer]:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            shown = found.setdefault(choice.index, {"text": "", "tokens": [], "finish_reason": None})
            shown["text"] += choice.text
            shown["tokens"] += (choice.logprobs and choice.logprobs.tokens) or []
            shown["finish_reason"] = choice.finish_reason or shown["finish_reason"]
    seen["choices"] = [found[index] for index in sorted(found)]
    return usage


def main() -> None:
    for line in sys.stdin:
        request = json.loads(line)
        seen: dict[str, Any] = {"choices": [], "chunks": 0, "usage": None, "status": 200, "error": ""}
        client = OpenAI(base_url=request["url"], api_key="none", max_retries=0)
        ask = ask_chat if request["api"] == "chat" else ask_completions
        try:
            usage = ask(client, request["body"] | {"extra_body": request["extra"]}, seen)
            seen["usage"] = usage and [usage.prompt_tokens, usage.completion_tokens]
        except OpenAIError as error:
            seen["error"] = f"{type(error).__name__}: {error}"
            seen["status"] = error.status_code if isinstance(error, APIStatusError) else 0
        say(seen)


main()
