"""Bodies of the OpenAI endpoints: fields and types, with vLLM's names beside OpenAI's.

`read_body` is the only place that parses a request's JSON. null means absent everywhere. A field that no struct names
is refused with its name. A field that would change the answer and is not served is in `UnservedFields`, or in
`FieldsOfVllm` if vLLM serves it. A request may give it only the value of the default behaviour. A field that changes
nothing is in `IgnoredFields` with its reason.
"""

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any, Final, Literal, TypeVar

import msgspec
from msgspec import Raw

from prfaas.errors import UNREADABLE, RequestError
from prfaas.wire.prefill import LegParams
from prfaas.wire.streams import StreamParams


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: Raw = Raw()  # padding that OpenAI adds; answers have none


class IgnoredFields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Fields that clients send and that change no answer. Their values are not read."""

    guided_decoding_backend: Raw = Raw()  # how vLLM guides, where another field asks for it
    guided_whitespace_pattern: Raw = Raw()  # likewise
    metadata: Raw = Raw()  # labels for OpenAI's dashboard
    parallel_tool_calls: Raw = Raw()  # no answer calls a tool
    prediction: Raw = Raw()  # a hint that makes OpenAI faster
    priority: Raw = Raw()  # order of service in vLLM; here it is the order of arrival
    prompt_cache_key: Raw = Raw()  # a routing hint; cached prefixes are found without one
    prompt_cache_options: Raw = Raw()  # likewise
    prompt_cache_retention: Raw = Raw()  # likewise
    request_id: Raw = Raw()  # the header x-request-id names a request
    safety_identifier: Raw = Raw()  # names an end user
    service_tier: Raw = Raw()  # OpenAI's price classes
    store: Raw = Raw()  # no answer is stored
    user: Raw = Raw()  # names an end user


class FieldsOfVllm(IgnoredFields, frozen=True, kw_only=True):
    """Tools and structured output, which vLLM serves. Each may be null, or its default: what happens anyway."""

    function_call: Any = "none"
    functions: Any = []
    guided_choice: Any = None
    guided_grammar: Any = None
    guided_json: Any = None
    guided_json_object: Any = False
    guided_regex: Any = None
    response_format: Any = msgspec.field(default_factory=lambda: {"type": "text"})
    structural_tag: Any = None
    structured_outputs: Any = None
    tool_choice: Any = "none"
    tools: Any = []


class UnservedFields(FieldsOfVllm, frozen=True, kw_only=True):
    """Fields that would change the answer and are not served. Each may be null, or its default, too."""

    adapter: Any = None
    adapters: Any = None
    allowed_token_ids: Any = None
    audio: Any = None
    bad_words: Any = []
    chat_template: Any = None
    detokenize: Any = True
    documents: Any = []
    include_stop_str_in_output: Any = False
    length_penalty: Any = 1
    logits_processors: Any = []
    lora: Any = None
    lora_path: Any = None
    lora_request: Any = None
    modalities: Any = msgspec.field(default_factory=lambda: ["text"])
    moderation: Any = None
    prompt_embeds: Any = None
    prompt_logprobs: Any = None
    return_tokens_as_token_ids: Any = False
    skip_special_tokens: Any = True
    spaces_between_special_tokens: Any = True
    suffix: Any = ""
    truncate_prompt_tokens: Any = None
    use_beam_search: Any = False
    verbosity: Any = "medium"
    web_search_options: Any = None


NEUTRAL: Final = UnservedFields()


class TransferParams(msgspec.Struct, frozen=True):
    """vLLM's field for connectors; of others than ours nothing is read."""

    prfaas: LegParams | None = None


class CommonFields(UnservedFields, frozen=True, kw_only=True):
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
    cache_salt: str | None = None
    echo: bool | None = None
    return_token_ids: bool | None = None
    prfaas_stream: StreamParams | None = None
    """What the gateway sends about a stream that may continue at another worker."""
    kv_transfer_params: TransferParams | None = None
    """What the gateway sends to one leg of a hand-off."""


class CompletionBody(CommonFields, frozen=True, kw_only=True):
    prompt: str | list[Any]
    logprobs: int | None = None


class ChatBody(CommonFields, frozen=True, kw_only=True):
    """POST /v1/chat/completions."""

    messages: list[dict[str, Any]]
    """`read_messages` checks them. They stay raw, since routers hash every field of a message."""
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


class TokenizeBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /tokenize of a prompt, or of a conversation with the fields of a chat. The model is optional."""

    model: str | None = None
    prompt: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    messages: list[dict[str, Any]] | None = None
    tools: Any = []
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


class DetokenizeBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    tokens: list[int]
    model: str | None = None


class ContentPart(msgspec.Struct, frozen=True):
    """A piece of a message's content; only text is served."""

    type: Literal["text"]
    text: str


class ChatMessage(msgspec.Struct, frozen=True):
    """One turn of a conversation. Unknown fields are ignored: clients send answers back whole."""

    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    """Calls of an earlier answer, for the template alone."""
    function_call: dict[str, Any] | None = None
    """The same in OpenAI's older form."""
    tool_call_id: str | None = None
    reasoning_content: str | None = None


class _Messages(msgspec.Struct, frozen=True):
    messages: list[ChatMessage]


_NESTED: Final[Mapping[str, type[msgspec.Struct]]] = {"stream_options": StreamOptions}
MAX_NAME: Final = 100  # What a client wrote is cut to so many characters in an error.
_NOT_SUGGESTED: Final = frozenset(UnservedFields.__struct_fields__)

Body = TypeVar("Body", bound=msgspec.Struct)


def read_body(body: bytes, kind: type[Body]) -> Body:
    """Parse JSON as `kind`. Raises RequestError if a field is missing, unknown, or of the wrong type."""
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise _refusal(error, kind) from error
    except UNREADABLE as error:
        raise RequestError(f"the body is not JSON: {error}", code="invalid_json") from error


def read_messages(messages: list[dict[str, Any]]) -> list[ChatMessage]:
    """Return a chat's typed messages. Raises RequestError if a field is missing or of the wrong type."""
    try:
        return msgspec.convert({"messages": messages}, _Messages).messages
    except msgspec.ValidationError as error:
        raise _refusal(error, _Messages) from error


def _refusal(error: msgspec.ValidationError, kind: type[msgspec.Struct]) -> RequestError:
    text, _, path = str(error).partition(" - at `$.")
    text, path = text[: 2 * MAX_NAME], path.rstrip("`")[:MAX_NAME]
    if text.startswith("Object contains unknown field"):
        return _unknown(text.partition("`")[2].removesuffix("`")[:MAX_NAME], path, kind)
    param = path.split("[")[0].split(".")[0] or None
    if text.startswith("Object missing required field"):
        param = text.split("`")[1] if param is None else param
    return RequestError(f"{text}{f' in {path}' if path else ''}", param=param)


def _unknown(name: str, path: str, kind: type[msgspec.Struct]) -> RequestError:
    known = [field for field in _NESTED.get(path, kind).__struct_fields__ if field not in _NOT_SUGGESTED]
    near = get_close_matches(name, known, n=1)
    param = f"{path}.{name}" if path else name
    text = f"{param} is not a parameter of this endpoint; " + (f"did you mean {near[0]}?" if near else "leave it out")
    return RequestError(text, code="unknown_parameter", param=param)
