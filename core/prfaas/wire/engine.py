"""Messages between a worker's two processes: the front (HTTP, text) and the engine (tensors).

Either side writes batches to a unix socket: a 4-byte length, then a msgpack array of messages. `handle` is the front's
number of one call; all the engine's messages about that call carry it. Only token ids cross, never text.
"""

import struct
from collections.abc import Sequence
from typing import BinaryIO, Final, Literal, NamedTuple

import msgspec

from prfaas.wire.frames import Buffer
from prfaas.wire.prefill import LegParams
from prfaas.wire.profile import Profile
from prfaas.wire.stats import CacheStats, EmulationStats, LinkStats
from prfaas.wire.trace import NO_TRACE, Moment, TraceContext

FinishReason = Literal["stop", "length"]
Direction = Literal["send", "receive"]
TransferOutcome = Literal["delivered", "cancelled", "expired", "mismatched", "failed"]
Role = Literal["prefill", "decode", "mixed"]
ALL_CHOICES: Final = -1


class Sampling(msgspec.Struct, frozen=True, array_like=True):
    """Sampling of tokens. temperature 0 is greedy; top_k 0 keeps all; equal seeds give equal text.

    Penalties count generated tokens (presence, frequency), or tokens of prompt and answer (repetition, 1 for none).
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


# front -> engine


class Generate(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Generate `choices` continuations. `logprobs` alternatives are reported for each token; -1: no logprobs."""

    handle: int
    request_id: str
    token_ids: list[int]
    choices: int
    max_tokens: int
    sampling: Sampling
    logprobs: int
    min_tokens: int = 0
    """No token that would end the answer is drawn before this many."""
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    cache_salt: str = ""
    """Only prompts with the same salt share cached prefixes."""
    trace: TraceContext = NO_TRACE
    generated: list[int] = []
    """Tokens that another worker drew already; the generation continues after them. For a single choice only."""
    choice: int = 0
    """The first choice's number, from which its random numbers and its answers derive."""
    leg: LegParams | None = None
    """Another instance prefills at the same time, or has a prefix: that is fetched, or computed if it does not come."""
    places: tuple[str, ...] | None = None
    """The other clusters whose bytes in the cache it may use; None: all."""


class GiveCache(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Compute all but the last token of a prompt, for a destination that knows the transfer; or with `leg.tokens` give
    so many tokens from the cache, and compute nothing. Answered by Announced at once, and by Started when that is done,
    or not wanted any more; or by Failed. From then on a lease ends it."""

    handle: int
    request_id: str
    token_ids: list[int]
    leg: LegParams
    cache_salt: str = ""
    trace: TraceContext = NO_TRACE
    places: tuple[str, ...] | None = None
    caller: str = ""
    """The buyer who asks, as `prfaas.rights.counted_as` names it; empty: the hub, the own cluster, or nobody knows."""


class ResetCache(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Forget every cached prefix that no running request uses. Answered by CacheReset."""

    handle: int


class SetRole(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Divide each step by this role's budgets from now on. Answered by RoleSet."""

    handle: int
    role: Role


class SetEgress(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Cap the egress of all data connections together, in Mbit/s; None: no cap. Answered by EgressSet."""

    handle: int
    mbps: int | None


class Cancel(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Forget a call, or one choice of it, and free what it holds. No answer."""

    handle: int
    choice: int = ALL_CHOICES


class AskStats(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Answered by Stats."""

    handle: int


class LearnBytes(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Publish what a request taught: an encoded batch of the byte map (`prfaas.wire.kvevents`). No answer."""

    payload: bytes


ToEngine = Generate | GiveCache | Cancel | AskStats | ResetCache | SetRole | SetEgress | LearnBytes


# engine -> front


class Ready(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The model is loaded and the data port listens."""

    fingerprint: str
    directory: str
    vocab_size: int
    max_context: int
    data_port: int


class StartFailed(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The engine cannot start, and exits; one sentence has the cause."""

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
    transfer_id: str = ""
    """The transfer that brought the cache; empty without one."""
    lost_transfer: str = ""
    """The value of LOST_TRANSFER."""
    moments: tuple[Moment, ...] = ()
    """The parts of its time to the first token, by the machine's monotonic clock; none for a source's leg."""


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


class Announced(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The cache of a GiveCache is offered up to this token, and its prompt is queued."""

    handle: int
    end_token: int


class CacheReset(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The cached prefixes are gone; carries the number of freed pages."""

    handle: int
    freed_pages: int


class RoleSet(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The role is in force."""

    handle: int
    role: Role


class EgressSet(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The egress cap is in force."""

    handle: int
    mbps: int | None


class Stats(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Gauges now and counters since the engine's start. `transfers` is counted by (direction, outcome).

    `prefixes` counts fetches of prefixes from other instances, by outcome; they brought `prefix_tokens`.
    `decode_seconds` is the time of the `decode_steps`, which computed only decodes. Transfers hold `memory_bytes` of
    `memory_limit_bytes` beside the cache; `egress_mbps` is the egress cap. `emulation` is that of an emulated engine.
    """

    handle: int = 0
    requests_running: int = 0
    requests_waiting: int = 0
    prefills_running: int = 0
    prefills_waiting: int = 0
    transfers: list[tuple[str, str, int]] = []
    sent_bytes: int = 0
    received_bytes: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    preemptions: int = 0
    decode_steps: int = 0
    decode_seconds: float = 0.0
    role: Role = "mixed"
    cache: CacheStats = CacheStats()
    links: tuple[LinkStats, ...] = ()
    egress_mbps: int | None = None
    memory_bytes: int = 0
    memory_limit_bytes: int = 0
    prefixes: tuple[tuple[str, int], ...] = ()
    prefix_tokens: int = 0
    emulation: EmulationStats | None = None


class Measured(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The measured costs of prefills here; sent after a change. Belongs to no call."""

    profile: Profile


class TransferSubject(NamedTuple):
    """A transfer's ids: the front's handle and the request's id, and the peer's cluster."""

    handle: int
    request_id: str
    peer: str = ""
    trace: TraceContext = NO_TRACE


class TransferEnded(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A transfer is over; sent once for each, before the messages about its request.

    Belongs to no call: its own may be over. `reason` is empty if it was delivered. `began_at` is unix seconds; `marks`
    are seconds after it, in order: some of announced, connected, first_byte and computed. The transfer took `seconds`,
    `flow_seconds` of them since the first cache byte. `payload_bytes` travelled, in frames through these `codecs`. The
    last count is that of its broken connections.
    """

    subject: TransferSubject
    direction: Direction
    outcome: TransferOutcome
    transfer_id: str
    began_at: float
    marks: tuple[tuple[str, float], ...]
    seconds: float
    flow_seconds: float
    payload_bytes: int
    codecs: tuple[str, ...]
    breaks: int
    reason: str


ToFront = (
    Ready
    | StartFailed
    | Started
    | Tokens
    | Failed
    | Announced
    | Stats
    | CacheReset
    | RoleSet
    | EgressSet
    | Measured
    | TransferEnded
)

LENGTH: Final = struct.Struct("!I")
_ENCODER: Final = msgspec.msgpack.Encoder()
_FOR_ENGINE: Final = msgspec.msgpack.Decoder(list[ToEngine])
_FOR_FRONT: Final = msgspec.msgpack.Decoder(list[ToFront])


def encode_batch(messages: Sequence[ToEngine] | Sequence[ToFront]) -> bytes:
    """Return a batch after its length."""
    return with_length(_ENCODER.encode(messages))


def with_length(body: bytes) -> bytes:
    """Return what a stream carries for a message: its length, then its body."""
    return LENGTH.pack(len(body)) + body


def read_body(reader: BinaryIO) -> bytes:
    """Read the next message's body from a stream; empty at the stream's end."""
    length = reader.read(LENGTH.size)
    return reader.read(LENGTH.unpack(length)[0]) if len(length) == LENGTH.size else b""


def decode_for_engine(body: Buffer) -> list[ToEngine]:
    """Read a batch from the front, which is our own code. A damaged batch is a bug and raises msgspec's error."""
    return _FOR_ENGINE.decode(body)


def decode_for_front(body: Buffer) -> list[ToFront]:
    """Read a batch from the engine; as `decode_for_engine`."""
    return _FOR_FRONT.decode(body)
