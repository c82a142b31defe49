"""Begin anew where kopf has ended because the API server refused to tell of a kind, instead of ending with it.

A CRD that is not served for a moment is enough, or a minute of missing rights or of a store that fails. What runs goes
on meanwhile, and nothing is changed, since our kinds are judged by each other; all are followed again as soon as every
one is served.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Final

from prfaas.errors import PrfaasError
from prfaas_operator.logs import is_refusal

log = logging.getLogger(__name__)

LOOK_SECONDS: Final = 1.0


async def follow(operate: Callable[[asyncio.Event], Awaitable[None]], term: asyncio.Event) -> bool:
    """Run kopf until it ends; tell whether an API server's refusal ended it, rather than `term`."""
    try:
        await operate(term)
    except Exception as error:
        if not is_refusal(error):
            raise
        log.error("our kinds are not followed any more: %s; again once the API server serves every one", error)
        return True
    return False


async def until_served(is_served: Callable[[], Awaitable[None]], term: asyncio.Event) -> None:
    """Wait until nothing is raised against a kind, or until `term`."""
    while not term.is_set():
        try:
            await is_served()
        except PrfaasError:
            try:
                async with asyncio.timeout(LOOK_SECONDS):
                    await term.wait()
            except TimeoutError:
                continue
        else:
            return
