"""What has to be made ready for a request before it can be admitted, in threads that the step loop never waits for.

A grammar must be compiled. Cached prefixes may stand in host memory or on a disk: bringing them is worth a moment,
but not more, since everything can be computed.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future

from prfaas_worker.cache.cache import HybridCache
from prfaas_worker.engine.events import Prepared
from prfaas_worker.engine.grammar import Compiled, Grammars
from prfaas_worker.engine.sequences import Phase, Request

LOAD_SECONDS = 2.0
"""A disk that takes longer than this to bring a prefix is not waited for."""


class Preparing:
    """Starts what a request needs; `post` hears of each part once or more, from any thread."""

    def __init__(self, grammars: Grammars, cache: HybridCache, post: Callable[[Prepared], None]):
        self._grammars = grammars
        self._cache = cache
        self._post = post

    def begin(self, request: Request) -> None:
        """Put a request that has just arrived into PREPARING, if it has to wait for anything."""
        self._begin_grammar(request)
        self._begin_loading(request)
        if request.awaits:
            request.sequences[0].phase = Phase.PREPARING

    def _begin_grammar(self, request: Request) -> None:
        grammar, handle = request.generate.grammar if request.generate else None, request.handle
        if grammar is None:
            return
        request.awaits.add("grammar")

        def compiled(future: Future[Compiled]) -> None:
            self._post(Prepared(handle, "grammar", future))

        self._grammars.prepare(grammar).add_done_callback(compiled)

    def _begin_loading(self, request: Request) -> None:
        (sequence,) = request.sequences
        loading = self._cache.prefetch(sequence.chain.hashes, len(sequence.token_ids) - 1)
        if loading is None or loading.done():
            return
        request.awaits.add("cache")
        ready = Prepared(request.handle, "cache")
        timer = threading.Timer(LOAD_SECONDS, self._post, (ready,))
        timer.daemon = True
        timer.start()

        def loaded() -> None:
            timer.cancel()  # each is a thread
            self._post(ready)

        loading.add_done_callback(loaded)
