"""What the handlers share while the worker serves, and whether it may take new work."""

import asyncio
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Final

from aiohttp import web

from prfaas.errors import CapacityError
from prfaas.telemetry.tracing import OFF, Tracing
from prfaas_worker.front.checks import Served
from prfaas_worker.front.engine_client import EngineClient
from prfaas_worker.front.events import Events
from prfaas_worker.front.metrics import Metrics
from prfaas_worker.front.spans import Reported
from prfaas_worker.options import Options
from prfaas_worker.tokenizer import Tokenizer

READERS: Final = 2
"""Threads that read requests: the engine computes on the same cores."""
LONG_BYTES: Final = 256 << 10
"""Longer bodies, whose tokens take a tenth of a second or more, wait for each other and for nobody else."""


class Serving:
    """State of the front. `served` and `tokenizer` exist once the engine has loaded the model."""

    def __init__(self, options: Options, engine: EngineClient, tracing: Tracing = OFF):
        self.options = options
        self.engine = engine
        self.metrics = Metrics(options.model_name, options.max_running)
        self.events = Events(options)
        engine.listeners += [self.metrics, self.events]
        self.tracing = tracing
        if tracing.is_on:
            engine.listeners.append(Reported(tracing))
        self.unread_bytes = 0
        """Of bodies that are on their way or wait for a thread."""
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="reader")
        self._long_reader = ThreadPoolExecutor(1, thread_name_prefix="long-reader")
        self.draining = False
        self._model: tuple[Served, Tokenizer] | None = None

    def reader(self, size: int) -> Executor:
        """Return where a body of so many bytes is tokenised, and its grammar checked."""
        return self._readers if size <= LONG_BYTES else self._long_reader

    def close(self) -> None:
        """Drop what waits to be read: the process would not end before."""
        for reader in (self._readers, self._long_reader):
            reader.shutdown(wait=False, cancel_futures=True)

    def loaded(self, served: Served, tokenizer: Tokenizer) -> None:
        """Open for requests."""
        self._model = served, tokenizer

    @property
    def ready(self) -> bool:
        """The model is loaded and new work is welcome."""
        return self._model is not None and not self.draining

    @property
    def served(self) -> Served:
        """What requests are checked against."""
        return self._loaded()[0]

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._loaded()[1]

    def require_open(self) -> None:
        """Raise CapacityError while the worker drains."""
        if self.draining:
            raise CapacityError("this instance is shutting down; send the request to another one")

    def require_loaded(self) -> None:
        """Raise CapacityError while the engine loads the model."""
        self._loaded()

    async def idle(self) -> None:
        """Wait until no request runs and no prefill is undelivered."""
        while True:
            stats = await self.engine.stats()
            if not (self.engine.open_calls or stats.prefills_running or stats.prefills_waiting):
                return
            await asyncio.sleep(0.05)

    def _loaded(self) -> tuple[Served, Tokenizer]:
        if self._model is None:
            raise CapacityError("the model is still loading; try again in a moment")
        return self._model


SERVING: Final = web.AppKey("serving", Serving)
