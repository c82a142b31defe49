"""The bodies of the text endpoints as they come: fields and types alone, with vLLM's names beside OpenAI's.

null means absent everywhere. Fields that no struct names are ignored, as the API asks; those of `Unserved` would change
the answer, so they are refused unless they ask for what happens anyway.
"""

from typing import Any, Literal, TypeVar

import msgspec
from msgspec import Raw

from prfaas.errors import RequestError


class StreamOptions(msgspec.Struct, frozen=True):
    """What a stream reports beyond its text."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class JsonSchema(msgspec.Struct, frozen=True):
    """The `json_schema` of a response format. The schema stays text: nothing here reads it."""

    schema: Raw


class ResponseFormat(msgspec.Struct, frozen=True):
    """OpenAI's form of structured output."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(msgspec.Struct, frozen=True):
    """vLLM's form of structured output."""

    json: Raw = Raw()
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: Any = None


class Unserved(msgspec.Struct, frozen=True, kw_only=True):
    """Fields that would change the answer and are not served."""

    adapter: Any = None
    adapters: Any = None
    allowed_token_ids: Any = None
    audio: Any = None
    bad_words: Any = None
    function_call: Any = None
    functions: Any = None
    include_stop_str_in_output: Any = None
    length_penalty: Any = None
    logits_processors: Any = None
    lora: Any = None
    lora_path: Any = None
    lora_request: Any = None
    modalities: Any = None
    prompt_embeds: Any = None
    prompt_logprobs: Any = None
    skip_special_tokens: Any = None
    suffix: Any = None
    truncate_prompt_tokens: Any = None
    use_beam_search: Any = None
    web_search_options: Any = None


class Common(Unserved, frozen=True, kw_only=True):
    """Fields of both endpoints."""

    model: str
    max_tokens: int | None = None
    min_tokens: int | None = None
    n: int | None = None
    best_of: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Raw = Raw()
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    cache_salt: str | None = None


class CompletionBody(Common, frozen=True, kw_only=True):
    """POST /v1/completions."""

    prompt: str | list[Any]
    logprobs: int | None = None
    echo: bool | None = None


class ContentPart(msgspec.Struct, frozen=True):
    """A piece of a message's content; text is the only type served."""

    type: Literal["text"]
    text: str


class CalledFunction(msgspec.Struct, frozen=True):
    """A function's name and its arguments, JSON as text."""

    name: str
    arguments: str


class ToolCall(msgspec.Struct, frozen=True):
    """A call that the assistant made."""

    id: str
    function: CalledFunction
    type: Literal["function"] = "function"


class ChatMessage(msgspec.Struct, frozen=True):
    """One turn of a conversation."""

    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None


class Conversed(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a chat's body that its prompt is rendered from; read apart, as /tokenize has it too."""

    messages: list[ChatMessage]
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


class ChatBody(Common, frozen=True, kw_only=True):
    """POST /v1/chat/completions, but for what its prompt is made of."""

    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    echo: bool | None = None


Body = TypeVar("Body", bound=msgspec.Struct)


def read_body(body: bytes, kind: type[Body]) -> Body:
    """Read JSON as `kind`.

    Raises:
        RequestError: not JSON, a field is missing, or one is of the wrong type.

    """
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        text, _, path = str(error).partition(" - at `$.")
        path = path.rstrip("`")
        param = path.split("[")[0].split(".")[0] or None
        if text.startswith("Object missing required field"):
            param = text.split("`")[1] if param is None else param
        raise RequestError(f"{text}{f' in {path}' if path else ''}", param=param) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RequestError(f"the body is not JSON: {error}", code="invalid_json") from error
