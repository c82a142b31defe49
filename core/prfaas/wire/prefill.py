"""Bodies of the Prefill-as-a-Service API, which a worker serves beside the OpenAI endpoints.

    POST   /v1/prefills        PrefillRequest -> 201 PrefillGrant
    POST   /v1/prefixes        PrefixRequest -> 201 PrefillGrant, or 404 when nothing longer than what the caller has
                               is cached here
    GET    /v1/prefills/{id}   -> PrefillStatus
    DELETE /v1/prefills/{id}   -> 204, also when it is gone already

The grant is a lease: whoever holds it connects to the data port in time and presents the token; see transfer.py.
"""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

PrefillState = Literal["waiting", "computing", "sending"]


class CacheRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt whose cache is wanted; the common fields of the two requests for one."""

    request_id: str
    model: str
    token_ids: list[int]
    start_token: int = 0
    cache_salt: str = ""


class PrefillRequest(CacheRequest, frozen=True, kw_only=True):
    """A prompt to prefill. The caller already has the attention rows before `start_token`, and they are not sent.

    Only prompts with the same `cache_salt` share cached prefixes. `prefix_url` names an instance that may have a longer
    prefix cached; that instance must prove that it belongs to `prefix_cluster`, empty for any.
    """

    prefix_url: str = ""
    prefix_cluster: str = ""


class PrefixRequest(CacheRequest, frozen=True, kw_only=True):
    """A prompt whose cached prefix is wanted: rows from `start_token` on, and the states at its end."""


class PrefillGrant(msgspec.Struct, frozen=True, kw_only=True):
    """The place to fetch the result from, its end token, and the lease's end. The token is a secret, never logged."""

    transfer_id: Annotated[str, Meta(pattern="^[0-9a-f]{32}\\Z")]
    token: str
    epoch: Annotated[int, Meta(ge=0, lt=1 << 62)]
    data_port: Annotated[int, Meta(ge=1, le=65535)]
    end_token: Annotated[int, Meta(ge=1, lt=1 << 32)]
    expires_seconds: int


class PrefillStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A prefill that is not delivered yet."""

    transfer_id: str
    request_id: str
    state: PrefillState
    prompt_tokens: int
    connected: bool
