"""An agent of pydantic-ai, as a program: see tests/clients/programs.py. It has no choices but one."""

import asyncio
import json
import sys
from typing import Any

from pydantic_ai import Agent
from pydantic_ai.exceptions import AgentRunError, ModelHTTPError
from pydantic_ai.messages import (
    ModelMessage,
    ModelRequest,
    ModelResponse,
    SystemPromptPart,
    TextPart,
    ToolCallPart,
    ToolReturnPart,
    UserPromptPart,
)
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIChatModelSettings
from pydantic_ai.providers.openai_compatible import OpenAICompatibleProvider

NAMES = {"logprobs": "openai_logprobs", "top_logprobs": "openai_top_logprobs"}
OWN = ("model", "messages", "stream", "stream_options")
"""What an agent writes itself."""


def say(line: dict[str, Any]) -> None:
    print(json.dumps(line), flush=True)


def message_of(message: dict[str, Any], names: dict[str, str]) -> ModelMessage:
    """Return a message in the framework's words; `names` are those of the functions of past calls."""
    content = message.get("content")
    match message["role"]:
        case "system":
            return ModelRequest([SystemPromptPart(content)])
        case "user":
            return ModelRequest([UserPromptPart(content)])
        case "tool":
            return ModelRequest([ToolReturnPart(names[message["tool_call_id"]], content, message["tool_call_id"])])
    calls = [(one["id"], one["function"]) for one in message.get("tool_calls", ())]
    names |= {key: function["name"] for key, function in calls}
    text = [TextPart(content)] if content else []
    return ModelResponse([*text, *(ToolCallPart(one["name"], one["arguments"], key) for key, one in calls)])


async def ask(request: dict[str, Any], seen: dict[str, Any]) -> Any:
    body = request["body"]
    names: dict[str, str] = {}
    history = [message_of(one, names) for one in body["messages"]]
    chosen = {NAMES.get(name, name): value for name, value in body.items() if name not in OWN}
    settings = OpenAIChatModelSettings(**chosen, max_retries=0, extra_body=request["extra"])
    provider = OpenAICompatibleProvider("prfaas", base_url=request["url"], api_key="none")
    agent = Agent(OpenAIChatModel(body["model"], provider=provider))
    if not body.get("stream"):
        return await agent.run(message_history=history, model_settings=settings)
    async with agent.run_stream(message_history=history, model_settings=settings) as result:
        async for _ in result.stream_response(debounce_by=None):
            if not seen["chunks"]:
                say({"begun": True})
            seen["chunks"] += 1
        return result


async def main() -> None:
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        seen: dict[str, Any] = {"choices": [], "chunks": 0, "usage": None, "status": 200, "error": ""}
        try:
            result = await ask(json.loads(line), seen)
            response, details = result.response, result.response.provider_details or {}
            tokens = [one["token"] for one in details.get("logprobs", ())]
            shown = {"text": response.text, "tokens": tokens, "finish_reason": details.get("finish_reason")}
            seen["choices"].append(shown)
            seen["usage"] = [response.usage.input_tokens, response.usage.output_tokens]
        except AgentRunError as error:
            seen["error"] = f"{type(error).__name__}: {error}"
            seen["status"] = error.status_code if isinstance(error, ModelHTTPError) else 0
        say(seen)


asyncio.run(main())
