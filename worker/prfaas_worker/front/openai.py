"""The OpenAI API's request bodies: read, checked, and turned into one plain `Job` for either endpoint.

A parameter that we do not serve is refused when it asks for something, never ignored: a silent difference in the answer
would be worse than an error.
"""

import secrets
from typing import Any, Literal, TypeVar

import msgspec

from prfaas.errors import RequestError
from prfaas.wire.engine import Sampling
from prfaas_worker.tokenizer import Conversation, Tokenizer

MAX_STOPS = 4
MAX_CHOICES = 128
MAX_TOP_LOGPROBS = 20
DEFAULT_COMPLETION_TOKENS = 16


class StreamOptions(msgspec.Struct, frozen=True):
    """What a stream reports beyond its text."""

    include_usage: bool = False


class Common(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of both endpoints; null means absent."""

    model: str
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    # Not served: anything but what changes nothing is refused.
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, float] | None = None


class CompletionBody(Common, frozen=True, kw_only=True):
    """POST /v1/completions."""

    prompt: str | list[Any]
    logprobs: int | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None


class ContentPart(msgspec.Struct, frozen=True):
    """A piece of a message's content; text is the only type served."""

    type: Literal["text"]
    text: str


class ChatMessage(msgspec.Struct, frozen=True):
    """One turn of a conversation."""

    role: str
    content: str | list[ContentPart]

    def plain(self) -> dict[str, str]:
        """Return role and whole text."""
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": self.role, "content": text}


class ChatBody(Common, frozen=True, kw_only=True):
    """POST /v1/chat/completions."""

    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[Any] | None = None
    functions: list[Any] | None = None
    response_format: dict[str, Any] | None = None


class Served(msgspec.Struct, frozen=True, kw_only=True):
    """What this worker serves: the names and bounds that requests are checked against."""

    model_name: str
    vocab_size: int
    max_context: int
    max_choices: int


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """A checked request. `logprobs` is the number of alternatives a token, -1 for none at all."""

    chat: bool
    token_ids: list[int]
    choices: int
    max_tokens: int
    sampling: Sampling
    stop: list[str]
    logprobs: int
    stream: bool
    include_usage: bool


def completion_job(body: bytes, served: Served, tokenizer: Tokenizer) -> Job:
    """Read and check POST /v1/completions.

    Raises:
        RequestError: what is wrong, in which field.

    """
    asked = read_body(body, CompletionBody)
    require_model(asked.model, served)
    _require_neutral(asked, echo=False, suffix="", best_of=asked.n or 1)
    logprobs = -1 if asked.logprobs is None else asked.logprobs
    _require(-1 <= logprobs <= MAX_TOP_LOGPROBS, "logprobs", f"must be 0 to {MAX_TOP_LOGPROBS}")
    token_ids = _prompt_tokens(asked.prompt, served, tokenizer)
    max_tokens = DEFAULT_COMPLETION_TOKENS if asked.max_tokens is None else asked.max_tokens
    return _job(asked, (token_ids, max_tokens, asked.max_tokens is not None), logprobs, served)


def chat_job(body: bytes, served: Served, tokenizer: Tokenizer) -> Job:
    """Read and check POST /v1/chat/completions.

    Raises:
        RequestError: what is wrong, in which field.

    """
    asked = read_body(body, ChatBody)
    require_model(asked.model, served)
    _require_neutral(asked, tools=[], functions=[], response_format={"type": "text"})
    _require(bool(asked.messages), "messages", "must have at least one message")
    top = asked.top_logprobs or 0
    _require(0 <= top <= MAX_TOP_LOGPROBS, "top_logprobs", f"must be 0 to {MAX_TOP_LOGPROBS}")
    _require(asked.logprobs or top == 0, "top_logprobs", "needs logprobs: true")
    token_ids = tokenizer.encode_chat(Conversation([message.plain() for message in asked.messages]))
    limit = asked.max_tokens if asked.max_completion_tokens is None else asked.max_completion_tokens
    max_tokens = served.max_context if limit is None else limit
    return _job(asked, (token_ids, max_tokens, limit is not None), top if asked.logprobs else -1, served)


def _job(asked: Common, lengths: tuple[list[int], int, bool], logprobs: int, served: Served) -> Job:
    """Check what both endpoints share; `lengths` is the prompt, the token limit and whether the caller gave it."""
    token_ids, max_tokens, limited = lengths
    _require_neutral(asked, frequency_penalty=0, presence_penalty=0, logit_bias={})
    _require(max_tokens >= 1, "max_tokens", "must be at least 1")
    room = require_room(token_ids, served)
    if limited and max_tokens > room:
        raise RequestError(
            f"{len(token_ids)} prompt tokens and max_tokens {max_tokens} exceed the context of {served.max_context} "
            f"tokens; ask for at most {room}",
            code="context_length_exceeded",
            param="max_tokens",
        )
    choices = 1 if asked.n is None else asked.n
    most = min(MAX_CHOICES, served.max_choices)
    _require(1 <= choices <= most, "n", f"must be 1 to {most}")
    return Job(
        chat=isinstance(asked, ChatBody),
        token_ids=token_ids,
        choices=choices,
        max_tokens=min(max_tokens, room),
        sampling=_sampling(asked),
        stop=_stops(asked.stop),
        logprobs=logprobs,
        stream=bool(asked.stream),
        include_usage=asked.stream_options is not None and asked.stream_options.include_usage,
    )


def require_room(token_ids: list[int], served: Served) -> int:
    """Return how many tokens may follow a prompt.

    Raises:
        RequestError: the prompt is empty, or leaves no room for a single token.

    """
    _require(bool(token_ids), "prompt", "must have at least one token")
    room = served.max_context - len(token_ids)
    if room < 1:
        raise RequestError(
            f"the prompt has {len(token_ids)} tokens, the context {served.max_context} and one token must be free; "
            "shorten the prompt",
            code="context_length_exceeded",
            param="prompt",
        )
    return room


def require_tokens(token_ids: list[Any], served: Served) -> list[int]:
    """Return a list that holds token ids of this model and nothing else.

    Raises:
        RequestError: an entry is no integer or outside of the vocabulary.

    """
    for entry in token_ids:
        if type(entry) is not int or not 0 <= entry < served.vocab_size:
            raise RequestError(
                f"prompt holds {entry!r}: want token ids of 0 to {served.vocab_size - 1}", param="prompt"
            )
    return token_ids


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
        param = path.rstrip("`").split("[")[0].split(".")[0] or None
        if text.startswith("Object missing required field"):
            param = text.split("`")[1] if param is None else param
        raise RequestError(f"{text}{f' in {path.rstrip(chr(96))}' if path else ''}", param=param) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RequestError(f"the body is not JSON: {error}", code="invalid_json") from error


def require_model(model: str, served: Served) -> None:
    """Raise RequestError unless `model` is the one served here."""
    if model != served.model_name:
        raise RequestError(
            f"model {model!r} is not served here; this instance serves {served.model_name!r}",
            status=404,
            code="model_not_found",
            param="model",
        )


def _require(held: bool, param: str, rule: str) -> None:
    if not held:
        raise RequestError(f"{param} {rule}", param=param)


def _require_neutral(asked: Common, **neutral: object) -> None:
    for param, value in neutral.items():
        given = getattr(asked, param)
        if given is not None and given != value:
            raise RequestError(f"{param} is not served here; leave it out", code="unsupported_parameter", param=param)


def _prompt_tokens(prompt: str | list[Any], served: Served, tokenizer: Tokenizer) -> list[int]:
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], (str, list)):
        prompt = prompt[0]  # a batch of one, as many clients send it
    if isinstance(prompt, str):
        return tokenizer.encode(prompt)
    if any(isinstance(entry, (str, list)) for entry in prompt):
        raise RequestError("prompt holds several prompts; send one request for each", param="prompt")
    return require_tokens(prompt, served)


def _sampling(asked: Common) -> Sampling:
    temperature = 1.0 if asked.temperature is None else asked.temperature
    top_p = 1.0 if asked.top_p is None else asked.top_p
    top_k = 0 if asked.top_k is None else asked.top_k
    seed = secrets.randbits(63) if asked.seed is None else asked.seed
    _require(0 <= temperature <= 2, "temperature", "must be 0 to 2")
    _require(0 < top_p <= 1, "top_p", "must be above 0 and at most 1")
    _require(-1 <= top_k < 1 << 31, "top_k", "must be at least 1, or 0 or -1 for no limit")
    _require(-(1 << 63) <= seed < 1 << 63, "seed", "must be a 64-bit integer")
    return Sampling(temperature, top_p, max(top_k, 0), seed)


def _stops(stop: str | list[str] | None) -> list[str]:
    stops = [] if stop is None else [stop] if isinstance(stop, str) else stop
    _require(len(stops) <= MAX_STOPS, "stop", f"may hold at most {MAX_STOPS} strings")
    _require(all(stops), "stop", "may not hold an empty string")
    return stops
