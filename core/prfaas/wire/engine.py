"""Messages between a worker's two processes: the front (HTTP, text) and the engine (tensors).

Either side writes batches to a unix socket: a 4-byte length, then a msgpack array of messages. `handle` is the front's
number of one call; all that the engine says about that call carries it. Text never crosses: only token ids do.
"""

import struct
from collections.abc import Sequence
from typing import Final, Literal

import msgspec

from prfaas.wire.prefill import PrefillGrant, PrefillStatus
from prfaas.wire.transfer import Buffer

FinishReason = Literal["stop", "length"]
ALL_CHOICES: Final = -1


class Sampling(msgspec.Struct, frozen=True, array_like=True):
    """How tokens are drawn. temperature 0 is greedy; top_k 0 keeps all; equal seeds give equal text."""

    temperature: float
    top_p: float
    top_k: int
    seed: int


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


class StartPrefill(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Prefill for another instance. Answered by Granted or Failed."""

    handle: int
    request_id: str
    token_ids: list[int]
    start_token: int


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


ToEngine = Generate | StartPrefill | Cancel | CancelPrefill | AskPrefill | AskStats


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


class Stats(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Gauges now and counters since the engine's start. `transfers` is counted by (direction, outcome)."""

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


ToFront = Ready | StartFailed | Started | Tokens | Failed | Granted | PrefillAnswer | Stats

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
