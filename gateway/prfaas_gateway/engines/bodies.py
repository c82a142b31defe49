"""Bodies of requests to engines of others, which want their own fields in them.

Values stay the text that came: only a body's top level is read, once for all legs, so that a number or a long prompt
arrives as the client wrote it.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from prfaas.errors import RequestError

Fields = Mapping[str, msgspec.Raw]

_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])
_ONE = msgspec.Raw(b"1")


def read_fields(body: bytes) -> Fields:
    """Return the fields of a body, each as the text that came; raises RequestError for what is no object."""
    try:
        return _fields.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(f"the request body is not JSON: {error}", code="invalid_json") from error


def with_fields(fields: Fields, added: Mapping[str, Any]) -> bytes:
    """Return a body of these fields and those added, which take the place of its own."""
    return msgspec.json.encode({**fields, **{name: _raw(value) for name, value in added.items()}})


def for_prefill(fields: Fields, added: Mapping[str, Any]) -> bytes:
    """Return the body of a leg that only prefills: one token, which nobody reads, and no stream."""
    kept = {name: value for name, value in fields.items() if name not in ("stream_options", "min_tokens")}
    kept |= {"stream": msgspec.Raw(b"false"), "max_tokens": _ONE}
    if "max_completion_tokens" in kept:
        kept["max_completion_tokens"] = _ONE
    return with_fields(kept, added)


def prompts(fields: Fields) -> int | None:
    """Return how many prompts a completion has in a list, None where it has a single one."""
    raw = bytes(fields.get("prompt", msgspec.Raw(b"null"))).lstrip()
    if not raw.startswith(b"["):
        return None
    listed: list[msgspec.Raw] = msgspec.json.decode(raw, type=list[msgspec.Raw])
    return len(listed) if listed and bytes(listed[0])[:1] in (b'"', b"[") else None


def _raw(value: Any) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(value))
