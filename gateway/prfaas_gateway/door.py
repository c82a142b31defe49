"""Who comes in: the API key of a request, and the limits of whoever it belongs to.

Asked before a request's body is read, so that a stranger costs a hash and no memory.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from aiohttp import web

from prfaas.errors import RequestError
from prfaas_gateway.keys import Client, KeyRing
from prfaas_gateway.meters import Meter, Meters

ANYBODY: Final = Client("")
"""Whoever comes where no keys are asked for."""
_SCHEME: Final = "bearer "


class Door:
    """Lets requests in.

    Args:
        keys: who may come; None: anybody, without a limit.
        clock: monotonic seconds.

    """

    def __init__(self, keys: KeyRing | None = None, clock: Callable[[], float] = time.monotonic):
        self._keys = keys
        self._meters = Meters(clock)
        self._anybody = Meter(ANYBODY, clock)

    @contextmanager
    def entered(self, request: web.Request) -> Iterator[Meter]:
        """Count one request of a client while it lasts.

        Raises:
            RequestError: 401, no valid key; 429, a limit of its owner is reached.

        """
        meter = self._meters.of(self.known(request)) if self._keys is not None else self._anybody
        with meter.request():
            yield meter

    def known(self, request: web.Request) -> Client:
        """Return who asks; raises RequestError with 401 for a stranger."""
        if self._keys is None:
            return ANYBODY
        given = request.headers.get("Authorization", "")
        if given[: len(_SCHEME)].lower() != _SCHEME:
            raise RequestError(
                "this endpoint wants an API key: send `Authorization: Bearer KEY`", status=401, code="missing_api_key"
            )
        client = self._keys.client(given[len(_SCHEME) :].strip().encode(errors="surrogateescape"))
        if client is None:
            raise RequestError("the API key is not known here", status=401, code="invalid_api_key")
        return client
