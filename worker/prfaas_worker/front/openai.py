"""The OpenAI API's requests, checked and turned into one plain `Job` for either endpoint.

A parameter that we do not serve is refused when it asks for something, never ignored: a silent difference in the answer
would be worse than an error.
"""

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from prfaas.errors import RequestError
from prfaas.wire.engine import Grammar, Sampling
from prfaas_worker.front import parameters
from prfaas_worker.front.bodies import ChatBody, ChatMessage, Common, CompletionBody, Conversed, read_body
from prfaas_worker.front.checks import (
    Served,
    require,
    require_model,
    require_room,
    require_tokens,
    unsupported,
)
from prfaas_worker.front.tools.use import ToolUse, template_arguments, tool_use, with_answer
from prfaas_worker.tokenizer import Conversation, Tokenizer
from prfaas_worker.tokenizer.template import OWN_VARIABLES

MAX_CHOICES: Final = 128
MAX_TOP_LOGPROBS: Final = 20
DEFAULT_COMPLETION_TOKENS: Final = 16


class Prompt(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt of a request: a call of the engine. `echo` is text to begin its answers with."""

    token_ids: list[int]
    max_tokens: int
    sampling: Sampling
    echo: str = ""


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """A checked request. `choices` are those of each prompt; `logprobs` the alternatives a token, -1 for none."""

    chat: bool
    prompts: list[Prompt]
    choices: int
    stop: list[str]
    logprobs: int
    stream: bool
    include_usage: bool = False
    continuous_usage: bool = False
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    grammar: Grammar | None = None
    cache_salt: str = ""
    tools: ToolUse | None = None
    unseeded: bool = False
    """The caller gave no seed: that of `sampling` is one of our own."""

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(len(prompt.token_ids) for prompt in self.prompts)


def completion_job(body: bytes, served: Served, tokenizer: Tokenizer) -> Job:
    """Read and check POST /v1/completions.

    Raises:
        RequestError: what is wrong, in which field.

    """
    asked = read_body(body, CompletionBody)
    require_model(asked.model, served)
    parameters.refuse_unserved(asked)
    logprobs = -1 if asked.logprobs is None else asked.logprobs
    require(-1 <= logprobs <= MAX_TOP_LOGPROBS, "logprobs", f"must be 0 to {MAX_TOP_LOGPROBS}")
    if asked.echo and logprobs >= 0:
        raise unsupported("echo", "echo with logprobs is not served: prompts have no log probabilities here")
    token_ids = [_prompt_tokens(prompt, served, tokenizer) for prompt in _prompts(asked.prompt)]
    job = _job(asked, token_ids, (asked.max_tokens, DEFAULT_COMPLETION_TOKENS), logprobs, served)
    job = msgspec.structs.replace(job, grammar=parameters.grammar(asked))
    if not asked.echo:
        return job
    texts = [
        given if isinstance(given, str) else tokenizer.decode(prompt.token_ids)
        for given, prompt in zip(_prompts(asked.prompt), job.prompts, strict=True)
    ]
    prompts = [msgspec.structs.replace(prompt, echo=text) for prompt, text in zip(job.prompts, texts, strict=True)]
    return msgspec.structs.replace(job, prompts=prompts)


def chat_job(body: bytes, served: Served, tokenizer: Tokenizer) -> Job:
    """Read and check POST /v1/chat/completions.

    Raises:
        RequestError: what is wrong, in which field.

    """
    asked = read_body(body, ChatBody)
    require_model(asked.model, served)
    parameters.refuse_unserved(asked)
    top = asked.top_logprobs or 0
    require(0 <= top <= MAX_TOP_LOGPROBS, "top_logprobs", f"must be 0 to {MAX_TOP_LOGPROBS}")
    require(asked.logprobs or top == 0, "top_logprobs", "needs logprobs: true")
    if asked.echo:
        raise unsupported("echo", "echo is served by /v1/completions alone; leave it out")
    conversed = read_body(body, Conversed)
    use = tool_use(conversed, tokenizer)
    # A model that may not call tools is not shown any.
    shown = conversed if use else msgspec.structs.replace(conversed, tools=None)
    token_ids = conversation_tokens(shown, tokenizer)
    limit = asked.max_tokens if asked.max_completion_tokens is None else asked.max_completion_tokens
    job = _job(asked, [token_ids], (limit, served.max_context), top if asked.logprobs else -1, served)
    grammar = parameters.grammar(asked)
    if use:
        grammar = with_answer(use, conversed, grammar, tokenizer)
        grammar = grammar and parameters.checked(grammar, "tools")
    return msgspec.structs.replace(job, grammar=grammar, tools=use)


def conversation_tokens(asked: Conversed, tokenizer: Tokenizer) -> list[int]:
    """Return the token ids of a conversation.

    Raises:
        RequestError: the messages are not in order, or the template refuses them.

    """
    require(bool(asked.messages), "messages", "must have at least one message")
    continued = bool(asked.continue_final_message)
    if continued and asked.add_generation_prompt:
        text = "continue_final_message and add_generation_prompt exclude each other"
        raise RequestError(text, param="continue_final_message")
    variables = dict(asked.chat_template_kwargs or {})
    taken = OWN_VARIABLES & variables.keys()
    require(not taken, "chat_template_kwargs", f"may not set {', '.join(sorted(taken))}")
    if asked.reasoning_effort is not None:
        variables.setdefault("reasoning_effort", asked.reasoning_effort)
    return tokenizer.encode_chat(
        Conversation(
            messages=[_plain(message, tokenizer) for message in asked.messages],
            tools=asked.tools or (),
            variables=variables,
            add_generation_prompt=asked.add_generation_prompt is not False,
            continued=continued,
        )
    )


def _plain(message: ChatMessage, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return a message as templates read it: without what it lacks, its parts joined."""
    content = message.content
    if isinstance(content, list):
        content = "".join(part.text for part in content)
    if content is None and not message.tool_calls:
        raise RequestError("messages: content is missing, and there are no tool_calls in its place", param="messages")
    plain: dict[str, Any] = {"role": message.role, "content": content}
    for name in ("name", "tool_call_id", "reasoning_content"):
        if (value := getattr(message, name)) is not None:
            plain[name] = value
    if message.tool_calls:
        plain["tool_calls"] = [
            {
                "id": call.id,
                "type": call.type,
                "function": {
                    "name": call.function.name,
                    "arguments": template_arguments(call.function.arguments, tokenizer),
                },
            }
            for call in message.tool_calls
        ]
    return plain


def _job(
    asked: Common, prompts: Sequence[list[int]], limits: tuple[int | None, int], logprobs: int, served: Served
) -> Job:
    """Check what both endpoints share; `limits` is the caller's token limit and the one that holds without."""
    limit, default = limits
    choices = 1 if asked.n is None else asked.n
    most = min(MAX_CHOICES, served.max_choices)
    require(1 <= choices <= most, "n", f"must be 1 to {most}")
    require(choices * len(prompts) <= MAX_CHOICES, "prompt", f"asks for more than {MAX_CHOICES} choices in one request")
    made = [
        Prompt(
            token_ids=token_ids,
            max_tokens=_room(token_ids, limit, default, served),
            sampling=parameters.sampling(asked, served),
        )
        for token_ids in prompts
    ]
    min_tokens = asked.min_tokens or 0
    shortest = min(prompt.max_tokens for prompt in made)
    require(0 <= min_tokens <= shortest, "min_tokens", f"must be 0 to max_tokens, here {shortest}")
    options = asked.stream_options
    return Job(
        chat=isinstance(asked, ChatBody),
        prompts=made,
        choices=choices,
        stop=parameters.stops(asked),
        logprobs=logprobs,
        stream=bool(asked.stream),
        include_usage=options is not None and options.include_usage,
        continuous_usage=options is not None and options.continuous_usage_stats,
        min_tokens=min_tokens,
        ignore_eos=bool(asked.ignore_eos),
        stop_token_ids=parameters.stop_tokens(asked, served),
        cache_salt=parameters.cache_salt(asked),
        unseeded=asked.seed is None,
    )


def _room(token_ids: list[int], limit: int | None, default: int, served: Served) -> int:
    """Return how many tokens an answer may have: the caller's limit, or as many of the default as fit."""
    require(limit is None or limit >= 1, "max_tokens", "must be at least 1")
    room = require_room(token_ids, served)
    if limit is not None and limit > room:
        raise RequestError(
            f"{len(token_ids)} prompt tokens and max_tokens {limit} exceed the context of {served.max_context} "
            f"tokens; ask for at most {room}",
            code="context_length_exceeded",
            param="max_tokens",
        )
    return min(default if limit is None else limit, room)


def _prompts(prompt: str | list[Any]) -> list[str | list[Any]]:
    """Return the prompts of a request: a text, token ids, or a list of either kind."""
    if isinstance(prompt, str) or not prompt:
        return [prompt]
    if all(isinstance(entry, str) for entry in prompt) or all(isinstance(entry, list) for entry in prompt):
        require(len(prompt) <= MAX_CHOICES, "prompt", f"may hold at most {MAX_CHOICES} prompts")
        return prompt
    return [prompt]


def _prompt_tokens(prompt: str | list[Any], served: Served, tokenizer: Tokenizer) -> list[int]:
    return tokenizer.encode(prompt) if isinstance(prompt, str) else require_tokens(prompt, served)
