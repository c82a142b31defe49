"""Reading requests without holding up streams: long ones in threads, where the tokenizer libraries release the lock."""

import asyncio
from collections.abc import Callable
from typing import Final, TypeVar

from prfaas_worker.front.checks import Served
from prfaas_worker.front.serving import Serving
from prfaas_worker.tokenizer import Tokenizer

INLINE_BYTES: Final = 2048
"""Bodies up to this length are read at once: tokenising so much takes a millisecond at most."""
# Grammars are checked as they are read, and a short one may take long.
_GRAMMAR_WORDS: Final = (b'"json_', b'"guided_', b'"structured_outputs"', b'"tools"')

Read = TypeVar("Read")


async def in_thread(serving: Serving, read: Callable[[bytes, Served, Tokenizer], Read], body: bytes) -> Read:
    """Return what `read` makes of a body, and let the event loop go on meanwhile if that may take long.

    Raises:
        CapacityError: the model is not loaded yet.
        RequestError: as `read` does.

    """
    served, tokenizer = serving.served, serving.tokenizer
    if len(body) <= INLINE_BYTES and not any(word in body for word in _GRAMMAR_WORDS):
        return read(body, served, tokenizer)
    return await asyncio.get_running_loop().run_in_executor(serving.readers, read, body, served, tokenizer)
