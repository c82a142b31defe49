"""Messages between a worker's two processes: the front (HTTP, text) and the engine (tensors).

Either side writes batches to a unix socket: a 4-byte length, then a msgpack array of messages. `handle` is the front's
number of one call; all that the engine says about that call carries it. Text never crosses: only token ids do.
"""

import struct
from collections.abc import Sequence
from typing import Final, Literal

import msgspec

from prfaas.wire.kvevents import KvEvent
from prfaas.wire.prefill import PrefillGrant, PrefillStatus
from prfaas.wire.profile import Profile
from prfaas.wire.transfer import Buffer

FinishReason = Literal["stop", "length"]
Role = Literal["prefill", "decode", "mixed"]
ALL_CHOICES: Final = -1


class Sampling(msgspec.Struct, frozen=True, array_like=True):
    """How tokens are drawn. temperature 0 is greedy; top_k 0 keeps all; equal seeds give equal text.

    Penalties count what was generated (presence, frequency) or stands in prompt and answer (repetition, 1 for none).
    `logit_bias` is added to the logits of these tokens.
    """

    temperature: float
    top_p: float
    top_k: int
    seed: int
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()


class Grammar(msgspec.Struct, frozen=True, array_like=True):
    """What an answer must be: a JSON schema, a regular expression or a Lark grammar, as text."""

    kind: Literal["json_schema", "regex", "lark"]
    text: str


# front -> engine


class Generate(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Generate `choices` continuations. `logprobs` is how many alternatives to report a token, -1 for no logprobs."""

    handle: int
    request_id: str
    token_ids: list[int]
    choices: int
    max_tokens: int
    sampling: Sampling
    logprobs: int
    prefill_url: str
    """API address of the instance that prefills, empty to prefill here."""
    min_tokens: int = 0
    """Until so many are drawn, no token that would end the answer is."""
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    grammar: Grammar | None = None
    cache_salt: str = ""
    """Only prompts with the same salt share cached prefixes."""


class StartPrefill(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Prefill for another instance. Answered by Granted or Failed."""

    handle: int
    request_id: str
    token_ids: list[int]
    start_token: int
    cache_salt: str = ""


class ResetCache(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Forget every cached prefix that no running request uses, in all tiers. Answered by CacheReset."""

    handle: int


class SetRole(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Divide each step by this role's budgets from now on. Answered by RoleSet."""

    handle: int
    role: Role


class Cancel(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Forget a call, or one choice of it, and free what it holds. No answer."""

    handle: int
    choice: int = ALL_CHOICES


class CancelPrefill(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Forget an undelivered prefill. No answer."""

    transfer_id: str


class AskPrefill(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Answered by PrefillAnswer."""

    handle: int
    transfer_id: str


class AskStats(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Answered by Stats."""

    handle: int


ToEngine = Generate | StartPrefill | Cancel | CancelPrefill | AskPrefill | AskStats | ResetCache | SetRole


# engine -> front


class Ready(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The model is loaded and the data port listens."""

    fingerprint: str
    directory: str
    vocab_size: int
    max_context: int
    data_port: int


class StartFailed(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The engine cannot start, and exits: one sentence."""

    message: str


class Started(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The prompt is prefilled; tokens follow. The seconds are defined in wire/headers.py."""

    handle: int
    cached_tokens: int
    kv_bytes: int
    prefill_seconds: float
    transfer_seconds: float
    first_byte_seconds: float
    queue_seconds: float = 0.0


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """Log probability of the drawn token, and of the most likely ones, before temperature and cuts."""

    logprob: float
    top: list[tuple[int, float]]


class Tokens(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """New tokens of one choice, without a stop token. `finish_reason` is None until the choice's last message."""

    handle: int
    choice: int
    token_ids: list[int]
    logprobs: list[TokenLogprob]
    finish_reason: FinishReason | None


class Failed(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The call is over: HTTP status, error code and a sentence."""

    handle: int
    status: int
    code: str
    message: str


class Granted(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The prefill is queued, and this is its lease."""

    handle: int
    grant: PrefillGrant


class PrefillAnswer(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A prefill's status, None when there is no such undelivered prefill."""

    handle: int
    status: PrefillStatus | None


class CacheReset(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The cached prefixes are gone: how many pages that freed."""

    handle: int
    freed_pages: int


class RoleSet(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The role is in force."""

    handle: int
    role: Role


class CacheStats(msgspec.Struct, frozen=True, array_like=True):
    """The prefix cache: pages now, and counts since the engine's start.

    `used_pages` are held by requests, `cached_pages` only by the prefix cache, which gives them up when others need
    them. Of `query_tokens` looked up, `hit_tokens` were found with a state, `stateless_tokens` more had attention rows
    but no state there.
    """

    page_bytes: int = 0
    total_pages: int = 0
    used_pages: int = 0
    cached_pages: int = 0
    query_tokens: int = 0
    hit_tokens: int = 0
    stateless_tokens: int = 0
    evicted_pages: int = 0
    host_bytes: int = 0
    disk_bytes: int = 0
    host_hit_tokens: int = 0
    disk_hit_tokens: int = 0
    corrupt_entries: int = 0


class Stats(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Gauges now and counters since the engine's start. `transfers` is counted by (direction, outcome).

    `decode_seconds` is what the `decode_steps` took, in which nothing but decodes was computed.
    """

    handle: int
    requests_running: int
    requests_waiting: int
    prefills_running: int
    prefills_waiting: int
    transfers: list[tuple[str, str, int]]
    sent_bytes: int
    received_bytes: int
    unsent_bytes: int
    backlogged_bytes: int
    backlogged_seconds: float
    prompt_tokens: int
    generation_tokens: int
    preemptions: int = 0
    decode_steps: int = 0
    decode_seconds: float = 0.0
    role: Role = "mixed"
    cache: CacheStats = CacheStats()


class Measured(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """What prefills cost here, as far as is known now; sent when that has changed. Belongs to no call."""

    profile: Profile


class KvEvents(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """What one step changed in the prefix cache, in order. Belongs to no call."""

    events: list[KvEvent]


ToFront = (
    Ready
    | StartFailed
    | Started
    | Tokens
    | Failed
    | Granted
    | PrefillAnswer
    | Stats
    | CacheReset
    | RoleSet
    | Measured
    | KvEvents
)

LENGTH: Final = struct.Struct("!I")
_ENCODER: Final = msgspec.msgpack.Encoder()
_FOR_ENGINE: Final = msgspec.msgpack.Decoder(list[ToEngine])
_FOR_FRONT: Final = msgspec.msgpack.Decoder(list[ToFront])


def encode_batch(messages: Sequence[ToEngine] | Sequence[ToFront]) -> bytes:
    """Return a batch with its length in front."""
    body = _ENCODER.encode(messages)
    return LENGTH.pack(len(body)) + body


def decode_for_engine(body: Buffer) -> list[ToEngine]:
    """Read a batch from the front. Our own other half wrote it: a damaged one raises msgspec's error, a bug."""
    return _FOR_ENGINE.decode(body)


def decode_for_front(body: Buffer) -> list[ToFront]:
    """Read a batch from the engine; as `decode_for_engine`."""
    return _FOR_FRONT.decode(body)
