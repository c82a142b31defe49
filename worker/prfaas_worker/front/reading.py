"""Reading requests without holding up streams: bounded in bytes, and long ones in threads.

The tokenizer libraries release the interpreter's lock, JSON decoding and lists of token ids do not: what a body may
have is therefore no more than a full context can need, and takes the lock for milliseconds.
"""

import asyncio
from collections.abc import Callable
from typing import Final, TypeVar

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from prfaas.errors import CapacityError, RequestError
from prfaas_worker.front.checks import Served
from prfaas_worker.front.serving import SERVING, Serving
from prfaas_worker.tokenizer import Tokenizer

INLINE_BYTES: Final = 2048
"""Bodies up to this length are read at once: tokenising so much takes a millisecond at most."""
MAX_UNREAD_BYTES: Final = 256 << 20
"""Of all bodies that are on their way or wait for a thread."""
# Grammars are checked as they are read, and a short one may take long.
_GRAMMAR_WORDS: Final = (b'"json_', b'"guided_', b'"structured_outputs"', b'"tools"')

Read = TypeVar("Read")


async def read_request(
    request: web.Request, read: Callable[[bytes, Served, Tokenizer], Read], beside_bytes: int = 0
) -> tuple[bytes, Read]:
    """Return a request's body, and what `read` makes of it. It may have `beside_bytes` more than a prompt needs.

    Raises:
        CapacityError: the model is not loaded yet, or too many bodies come at once.
        RequestError: the body is too long; else as `read` does.

    """
    serving = request.app[SERVING]
    most = serving.served.max_body_bytes + beside_bytes
    if (length := request.content_length) is not None and length > most:
        raise _too_long(f"{length} bytes", serving.served)
    parts: list[bytes] = []
    size = 0
    try:
        async for part in request.content.iter_any():
            parts.append(part)
            size += len(part)
            serving.unread_bytes += len(part)
            if size > most:
                raise _too_long(f"more than {most} bytes", serving.served)
            if serving.unread_bytes > MAX_UNREAD_BYTES:
                raise CapacityError("too many long requests come at once; try another instance, or later")
        body = b"".join(parts)
        parts.clear()
        return body, await in_thread(serving, read, body)
    except (web.RequestPayloadError, HttpProcessingError) as error:
        raise RequestError(f"the body does not have the encoding that its headers say: {error}") from error
    finally:
        serving.unread_bytes -= size


async def in_thread(serving: Serving, read: Callable[[bytes, Served, Tokenizer], Read], body: bytes) -> Read:
    """Return what `read` makes of a body, and let the event loop go on meanwhile if that may take long.

    Raises:
        CapacityError: the model is not loaded yet.
        RequestError: as `read` does.

    """
    served, tokenizer = serving.served, serving.tokenizer
    if len(body) <= INLINE_BYTES and not any(word in body for word in _GRAMMAR_WORDS):
        return read(body, served, tokenizer)
    return await asyncio.get_running_loop().run_in_executor(serving.reader(len(body)), read, body, served, tokenizer)


def _too_long(size: str, served: Served) -> RequestError:
    return RequestError(
        f"the body has {size}; with a context of {served.max_context} tokens at most {served.max_body_bytes} are read: "
        "shorten it, or send several requests",
        status=413,
        code="request_too_large",
    )
