"""Reads requests of the OpenAI endpoints: checks a body and builds the messages that ask the engine for the answer.

A parameter that is not served is refused by its name, never ignored. An error is better than an answer that silently
differs from what was asked for.
"""

import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from prfaas.bounds.requests import MAX_BIASES, MAX_CHOICES, MAX_STOP_TOKENS, check_stops
from prfaas.errors import RequestError
from prfaas.wire.engine import Generate, Sampling
from prfaas.wire.streams import SEED_BITS, STREAM_FIELD, StreamParams
from prfaas_worker.front.openai_bodies import (
    MAX_NAME,
    NEUTRAL,
    ChatBody,
    ChatMessage,
    CommonFields,
    CompletionBody,
    FieldsOfVllm,
    IgnoredFields,
    TokenizeBody,
    UnservedFields,
    read_body,
    read_messages,
)
from prfaas_worker.front.serving import ServedModel, require, require_model, require_room, require_tokens, unsupported
from prfaas_worker.tokenizer import OWN_VARIABLES, Conversation, Tokenizer

MAX_TOP_LOGPROBS: Final = 20
DEFAULT_COMPLETION_TOKENS: Final = 16
MAX_SALT: Final = 256
REASONING_EFFORTS: Final = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
_SEED_STEP: Final = 0x9E3779B97F4A7C15  # odd, so that no two prompts of a request have one seed
_TOKEN_ID: Final = re.compile(r"[0-9]{1,18}")  # int() refuses thousands of digits
_ADAPTERS: Final = frozenset({"adapter", "adapters", "lora", "lora_path", "lora_request"})
_OF_VLLM: Final = frozenset(FieldsOfVllm.__struct_fields__)
_UNSERVED: Final = tuple(
    name for name in UnservedFields.__struct_fields__ if name not in IgnoredFields.__struct_fields__
)


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """A checked request. `prompts` are the messages to the engine, one for each prompt, without handle and trace.
    `echoes` are the texts that begin the answers to each prompt."""

    body: CompletionBody | ChatBody
    prompts: list[Generate]
    stop: list[str]
    echoes: list[str]

    @property
    def gives_cache(self) -> bool:
        """True for a source's leg: its answer has no text."""
        return (leg := self.prompts[0].leg) is not None and leg.role == "source"

    @property
    def is_chat(self) -> bool:
        return isinstance(self.body, ChatBody)

    @property
    def choices(self) -> int:
        return self.prompts[0].choices

    @property
    def has_usage(self) -> bool:
        """True if a stream ends with its usage."""
        return self.body.stream_options is not None and self.body.stream_options.include_usage

    @property
    def has_continuous_usage(self) -> bool:
        """True if every event of a stream holds the usage so far."""
        return self.body.stream_options is not None and self.body.stream_options.continuous_usage_stats

    @property
    def prompt_tokens(self) -> int:
        return sum(len(prompt.token_ids) for prompt in self.prompts)

    @property
    def drawn(self) -> Mapping[int, list[int]]:
        """The tokens that the client has already, by choice."""
        return self.body.prfaas_stream.drawn if self.body.prfaas_stream else {}

    def messages(self) -> dict[int, Generate]:
        """Return the messages to the engine by the index of their first choice. A stream that continues has one for
        each choice that has not ended."""
        stream = self.body.prfaas_stream
        if stream is None or not stream.continues:
            return {place * self.choices: prompt for place, prompt in enumerate(self.prompts)}
        messages: dict[int, Generate] = {}
        for index in range(len(self.prompts) * self.choices):
            if index in stream.ended:
                continue
            place, number = divmod(index, self.choices)
            prompt = self.prompts[place]
            leg = None if messages else prompt.leg  # one of them fetches, and the others find it in the cache
            generated = stream.drawn.get(index, [])
            messages[index] = msgspec.structs.replace(prompt, choices=1, choice=number, generated=generated, leg=leg)
        return messages


@dataclass(frozen=True)
class RequestReader:
    """Makes jobs from bodies. Call it in a thread if a body is long."""

    served: ServedModel
    tokenizer: Tokenizer
    request_id: str = ""

    def completion_job(self, data: bytes) -> Job:
        body = read_body(data, CompletionBody)
        require_model(body.model, self.served)
        refuse_unserved(body)
        logprobs = -1 if body.logprobs is None else body.logprobs
        require(-1 <= logprobs <= MAX_TOP_LOGPROBS, "logprobs", f"must be 0 to {MAX_TOP_LOGPROBS}")
        if body.echo and logprobs >= 0:
            raise unsupported("echo", "echo with logprobs is not served: prompts have no log probabilities here")
        texts = _prompts(body.prompt)
        prompts = self._messages(body, [self._token_ids(prompt) for prompt in texts], logprobs)
        echoes = [""] * len(texts)
        if body.echo:
            echoes = [
                text if isinstance(text, str) else self.tokenizer.decode(prompt.token_ids)
                for text, prompt in zip(texts, prompts, strict=True)
            ]
        return self._job(body, prompts, echoes)

    def chat_job(self, data: bytes) -> Job:
        body = read_body(data, ChatBody)
        require_model(body.model, self.served)
        refuse_unserved(body)
        top = body.top_logprobs or 0
        require(0 <= top <= MAX_TOP_LOGPROBS, "top_logprobs", f"must be 0 to {MAX_TOP_LOGPROBS}")
        require(body.logprobs or top == 0, "top_logprobs", "needs logprobs: true")
        if body.echo:
            raise unsupported("echo", "echo is served by /v1/completions only; leave it out")
        token_ids = conversation_tokens(body, self.tokenizer)
        prompts = self._messages(body, [token_ids], top if body.logprobs else -1)
        return self._job(body, prompts, [""])

    def _job(self, body: CompletionBody | ChatBody, prompts: list[Generate], echoes: list[str]) -> Job:
        job = Job(body=body, prompts=prompts, stop=_stops(body), echoes=echoes)
        if body.prfaas_stream is not None and body.prfaas_stream.continues:
            _check_drawn(body.prfaas_stream, job, self.served)
        return job

    def _token_ids(self, prompt: str | list[Any]) -> list[int]:
        return self.tokenizer.encode(prompt) if isinstance(prompt, str) else require_tokens(prompt, self.served)

    def _messages(self, body: CompletionBody | ChatBody, prompts: list[list[int]], logprobs: int) -> list[Generate]:
        choices = 1 if body.n is None else body.n
        most = min(MAX_CHOICES, self.served.max_choices)
        require(1 <= choices <= most, "n", f"must be 1 to {most}")
        if body.best_of not in (None, choices):
            raise unsupported("best_of", "best_of must equal n: every generated choice is returned")
        many = choices * len(prompts) > MAX_CHOICES
        require(not many, "prompt", f"asks for more than {MAX_CHOICES} choices in one request")
        fit = self.served.max_prompts
        rule = f"has {len(prompts)} prompts and this worker takes {fit} at once: send several requests, or raise its"
        require(len(prompts) <= fit, "prompt", f"{rule} --max-running")
        limits = [self._max_tokens(body, token_ids) for token_ids in prompts]
        samplings = [_sampling(body, self.served, self._seed(body, place)) for place in range(len(prompts))]
        min_tokens = body.min_tokens or 0
        require(0 <= min_tokens <= min(limits), "min_tokens", f"must be 0 to max_tokens, here {min(limits)}")
        stop_token_ids = _stop_tokens(body, self.served)
        cache_salt = _cache_salt(body)
        leg = body.kv_transfer_params.prfaas if body.kv_transfer_params else None
        rule = f"names one transfer, and the request has {len(prompts)} prompts: send one, or leave it out"
        require(leg is None or len(prompts) == 1, "kv_transfer_params", rule)
        return [
            Generate(
                handle=0,
                request_id=self.request_id,
                token_ids=token_ids,
                choices=choices,
                max_tokens=limit,
                sampling=sampling,
                logprobs=logprobs,
                min_tokens=min_tokens,
                ignore_eos=bool(body.ignore_eos),
                stop_token_ids=stop_token_ids,
                cache_salt=cache_salt,
                leg=leg,
            )
            for token_ids, limit, sampling in zip(prompts, limits, samplings, strict=True)
        ]

    def _max_tokens(self, body: CompletionBody | ChatBody, token_ids: list[int]) -> int:
        """Return the limit of an answer's tokens: the caller's, or the part of the default that fits."""
        limit, default = body.max_tokens, DEFAULT_COMPLETION_TOKENS
        if isinstance(body, ChatBody):
            limit = limit if body.max_completion_tokens is None else body.max_completion_tokens
            default = self.served.max_context
        require(limit is None or limit >= 1, "max_tokens", "must be at least 1")
        room = require_room(token_ids, self.served)
        if limit is not None and limit > room:
            raise RequestError(
                f"{len(token_ids)} prompt tokens and max_tokens {limit} exceed the context of "
                f"{self.served.max_context} tokens; ask for at most {room}",
                code="context_length_exceeded",
                param="max_tokens",
            )
        return min(default if limit is None else limit, room)

    def _seed(self, body: CommonFields, place: int) -> int:
        """Return the seed of prompt number `place`: the client's, the gateway's, or a random one."""
        if body.seed is not None:
            return body.seed
        fixed = body.prfaas_stream
        return secrets.randbits(SEED_BITS) if fixed is None else (fixed.seed + place * _SEED_STEP) % (1 << SEED_BITS)


def _check_drawn(stream: StreamParams, job: Job, served: ServedModel) -> None:
    """Check what the client has of an answer. Raises RequestError if it is of another request or model."""
    require(bool(job.body.stream), STREAM_FIELD, "continues an answer, and needs stream: true")
    if stream.model != served.fingerprint:
        raise refused_stream("another model began this answer")
    for index in {*stream.drawn, *stream.ended}:
        token_ids = stream.drawn.get(index, [])
        known = 0 <= index < len(job.prompts) * job.choices
        if not known or any(token >= served.vocab_size for token in token_ids):
            raise refused_stream(f"choice {index} is none of this request's")
        most = job.prompts[index // job.choices].max_tokens
        if len(token_ids) > most or (len(token_ids) == most and index not in stream.ended):
            raise refused_stream(f"choice {index} has {len(token_ids)} tokens of at most {most} and has not ended")


def refused_stream(message: str) -> RequestError:
    """Return the error for a stream that this worker cannot continue; another one may."""
    return RequestError(message, status=409, code="stream_refused", param=STREAM_FIELD)


def conversation_tokens(body: ChatBody | TokenizeBody, tokenizer: Tokenizer) -> list[int]:
    """Return a conversation's token ids. Raises RequestError if messages are invalid or the template refuses them."""
    messages = read_messages(body.messages or [])
    require(bool(messages), "messages", "must have at least one message")
    continued = bool(body.continue_final_message)
    if continued and body.add_generation_prompt:
        text = "continue_final_message and add_generation_prompt exclude each other"
        raise RequestError(text, param="continue_final_message")
    variables = dict(body.chat_template_kwargs or {})
    taken = OWN_VARIABLES & variables.keys()
    require(not taken, "chat_template_kwargs", f"may not set {', '.join(sorted(taken))}")
    if body.reasoning_effort is not None:
        known = ", ".join(REASONING_EFFORTS)
        require(body.reasoning_effort in REASONING_EFFORTS, "reasoning_effort", f"must be one of {known}")
        variables.setdefault("reasoning_effort", body.reasoning_effort)
    return tokenizer.encode_chat(
        Conversation(
            messages=[_plain(message) for message in messages],
            variables=variables,
            add_generation_prompt=body.add_generation_prompt is not False,
            continued=continued,
        )
    )


def _plain(message: ChatMessage) -> dict[str, Any]:
    """Return a message as templates read it: without absent fields, its parts joined."""
    content = message.content
    if isinstance(content, list):
        content = "".join(part.text for part in content)
    calls = message.tool_calls or []
    if message.function_call and not calls:
        name = message.function_call.get("name", "")  # the older form has no ids: names are in their place
        calls = [{"id": name, "type": "function", "function": message.function_call}]
    if content is None and not calls:
        raise RequestError("messages: content is missing, and there are no tool_calls in its place", param="messages")
    plain: dict[str, Any] = {"role": message.role, "content": content}
    if calls:
        plain["tool_calls"] = calls
    if message.role == "function" and message.name:
        plain["tool_call_id"] = message.name
    for name in ("name", "tool_call_id", "reasoning_content"):
        if (value := getattr(message, name)) is not None:
            plain[name] = value
    return plain


def _prompts(prompt: str | list[Any]) -> list[str | list[Any]]:
    """Return the prompts of a request: a text, token ids, or a list of either kind."""
    if isinstance(prompt, str) or not prompt:
        return [prompt]
    if all(isinstance(entry, str) for entry in prompt) or all(isinstance(entry, list) for entry in prompt):
        require(len(prompt) <= MAX_CHOICES, "prompt", f"may hold at most {MAX_CHOICES} prompts")
        return prompt
    return [prompt]


def refuse_unserved(body: CommonFields | TokenizeBody) -> None:
    """Raise RequestError for a field that would change the answer and is not served."""
    for param in _UNSERVED:
        setting = getattr(body, param, None)
        if setting is None or setting == getattr(NEUTRAL, param):
            continue
        if param in _OF_VLLM:
            cure = "serve the model with vLLM (engine.type: vllm), or leave the field out"
            raise unsupported(param, f"{param} is not served by this engine; {cure}")
        if param in _ADAPTERS:
            raise unsupported(param, f"{param} names a LoRA adapter, and adapters are not served here; leave it out")
        raise unsupported(param, f"{param} is not served here; leave it out")


def _sampling(body: CommonFields, served: ServedModel, seed: int) -> Sampling:
    drawn = Sampling(
        temperature=_or_default(body.temperature, 1.0),
        top_p=_or_default(body.top_p, 1.0),
        top_k=max(body.top_k or 0, 0),
        seed=seed,
        min_p=_or_default(body.min_p, 0.0),
        presence_penalty=_or_default(body.presence_penalty, 0.0),
        frequency_penalty=_or_default(body.frequency_penalty, 0.0),
        repetition_penalty=_or_default(body.repetition_penalty, 1.0),
        logit_bias=_biases(body.logit_bias or {}, served),
    )
    require(0 <= drawn.temperature <= 2, "temperature", "must be 0 to 2")
    require(0 < drawn.top_p <= 1, "top_p", "must be above 0 and at most 1")
    require(-1 <= (body.top_k or 0) < 1 << 31, "top_k", "must be at least 1, or 0 or -1 for no limit")
    require(-(1 << 63) <= drawn.seed < 1 << 63, "seed", "must be a 64-bit integer")
    require(0 <= drawn.min_p <= 1, "min_p", "must be 0 to 1")
    require(-2 <= drawn.presence_penalty <= 2, "presence_penalty", "must be -2 to 2")
    require(-2 <= drawn.frequency_penalty <= 2, "frequency_penalty", "must be -2 to 2")
    require(0 < drawn.repetition_penalty <= 10, "repetition_penalty", "must be above 0 and at most 10")
    return drawn


def _stops(body: CommonFields) -> list[str]:
    found = [] if body.stop is None else [body.stop] if isinstance(body.stop, str) else body.stop
    check_stops(found)
    require(all(found), "stop", "may not hold an empty string")
    return found


def _stop_tokens(body: CommonFields, served: ServedModel) -> tuple[int, ...]:
    found = require_tokens(body.stop_token_ids or [], served, "stop_token_ids")
    require(len(found) <= MAX_STOP_TOKENS, "stop_token_ids", f"may hold at most {MAX_STOP_TOKENS} tokens")
    return tuple(found)


def _cache_salt(body: CommonFields) -> str:
    salt = body.cache_salt
    require(salt is None or 0 < len(salt) <= MAX_SALT, "cache_salt", f"must have 1 to {MAX_SALT} characters")
    return salt or ""


def _biases(biases: Mapping[str, float], served: ServedModel) -> tuple[tuple[int, float], ...]:
    require(len(biases) <= MAX_BIASES, "logit_bias", f"may hold at most {MAX_BIASES} tokens")
    for token, bias in biases.items():
        known = _TOKEN_ID.fullmatch(token) is not None and int(token) < served.vocab_size
        require(known, "logit_bias", f"holds {token[:MAX_NAME]!r}: want token ids of 0 to {served.vocab_size - 1}")
        require(-100 <= bias <= 100, "logit_bias", f"of token {token} must be -100 to 100")
    return tuple((int(token), bias) for token, bias in biases.items())


def _or_default(value: float | None, default: float) -> float:
    return default if value is None else value
