"""What the two instances of a hand-off are told: legs of one request, and the Prefill-as-a-Service API.

The gateway names a transfer and sends both legs of a request at once, on the same OpenAI route, with `LegParams` in
`kv_transfer_params.prfaas`. The source offers the cache of the prompt's first tokens, its *goal*, and computes exactly
that far. The destination fetches it from the source's data port, and computes the rest itself, at least the last token.
An engine has one rule for goals, so both sides know the goal without asking.

A *prefix* that another instance has cached crosses in the same way. The gateway names its length, by its index of all
caches, and an engine has one rule for goals of these, too. Our worker gives exactly that, or nothing; vLLM computes
what it lacks.

`POST /v1/prefills` is the same source's leg for callers with token ids: a PrefillRequest, answered at once by 201 and a
PrefillOffer. They connect to the data port in time and present the token; see transfer.py.
"""

import hashlib
import secrets
import uuid
from array import array
from typing import Annotated, Any, Final, Literal, TypeAlias

import msgspec
from msgspec import Meta

MAX_TENSOR_RANKS: Final = 64
DIGEST_CHARS: Final = 32
EPOCH_BITS: Final = 48
TOKEN_BYTES: Final = 32
# 253: the longest name in DNS (RFC 1035 allows 255 bytes with its lengths).
_Word: TypeAlias = Annotated[str, Meta(pattern=r"^[!-~]{0,253}\Z")]


class LegParams(msgspec.Struct, frozen=True, kw_only=True):
    """What a gateway, or a buyer of prefills, tells one leg of the transfer that it names. The token is a secret, and
    never logged. `host`, `port` and `cluster` are those of the source's data port, and `place` is what the cluster's
    bytes are known by (`routes.Cluster`), empty for its name. `ranks` are the other instance's
    tensor-parallel ranks; 0: as many as here. With `tokens` the source has so many of a prefix; 0: it computes the
    prompt. A source that computes may have a `prefix` to fetch first, as that transfer's destination; a prefix of that
    is ignored.

    Anybody who reaches an engine's port may send it. So all of it fits into one message to the mover, and into a
    frame's header.
    """

    role: Literal["source", "destination"]
    transfer_id: Annotated[str, Meta(pattern=r"^[0-9a-f]{32}\Z")]
    epoch: Annotated[int, Meta(ge=0, lt=1 << 62)]
    token: _Word
    host: _Word = ""
    port: Annotated[int, Meta(ge=0, le=65_535)] = 0
    cluster: _Word = ""
    place: _Word = ""
    ranks: Annotated[int, Meta(ge=0, le=MAX_TENSOR_RANKS)] = 0
    tokens: Annotated[int, Meta(ge=0, lt=1 << 32)] = 0
    prefix: "LegParams | None" = None


def is_whole_prefill(leg: LegParams) -> bool:
    """Return true if a leg asks for what `POST /v1/prefills` does: compute a whole prompt, and connect to nobody."""
    return leg.role == "source" and not leg.tokens and leg.prefix is None


def names_sources(leg: LegParams) -> bool:
    """Return true if a leg says of which cluster each source is that it fetches from."""
    return (leg.role == "source" or leg.cluster != "") and (leg.prefix is None or leg.prefix.cluster != "")


def new_transfer() -> dict[str, Any]:
    """Return the fields of both legs' LegParams that name a transfer, which no other one has."""
    return {
        "transfer_id": uuid.uuid4().hex,
        "epoch": secrets.randbits(EPOCH_BITS),
        "token": secrets.token_urlsafe(TOKEN_BYTES),
    }


def token_digest(ids: list[int]) -> str:
    """Return a digest of a prompt's tokens before its goal.

    Each side makes token ids of a prompt by its own tokenizer and chat template, which may add the day's date. A cache
    of other tokens has the same shape if they are as many.
    """
    return hashlib.sha256(array("I", ids)).hexdigest()[:DIGEST_CHARS]


class PrefillRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt to prefill for a caller that names the transfer. Only prompts with the same `cache_salt` share cached
    prefixes."""

    request_id: str
    model: str
    token_ids: list[int]
    leg: LegParams
    cache_salt: str = ""


class PrefillOffer(msgspec.Struct, frozen=True, kw_only=True):
    """The cache of a prompt's tokens before `end_token` is offered at `data_port`, on the host that answers."""

    data_port: Annotated[int, Meta(ge=1, le=65_535)]
    end_token: Annotated[int, Meta(ge=1, lt=1 << 32)]
