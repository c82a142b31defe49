"""Two engines that are stepped by hand, and fetch from each other over real sockets; only HTTP is left out."""

import queue
import time
from collections.abc import Callable
from typing import Any

from prfaas.errors import PeerError
from prfaas.wire.engine import Failed, Granted, StartPrefill, StartPrefix
from prfaas.wire.prefill import PrefillGrant, PrefillRequest, PrefixRequest
from prfaas_transfer import pull
from prfaas_transfer.data_port import DataPort, listen
from prfaas_transfer.fetch import AbsentError, RemoteFetch, SourceApi
from prfaas_transfer.pull import FetchContext
from prfaas_transfer.tls import PeerAuth
from prfaas_worker.engine.sequences import PrefillOffered, Sequence
from prfaas_worker.models.base import Model

from ...waiting import eventually
from .engine_bench import TRAFFIC, Bench
from .transfer_bench import transfer_threads

FAR = 1_000_000
"""Handles of requests for another engine."""


class Source(Bench):
    """An engine with a data port."""

    def __init__(self, model: Model, **how: Any):
        super().__init__(model, **how)
        listener = listen("127.0.0.1", 0)
        self.offers._data_port = listener.getsockname()[1]
        DataPort(listener, self.offers, TRAFFIC)
        self.answers: queue.SimpleQueue[Granted | Failed] = queue.SimpleQueue()
        self.requests = 0

    def step(self) -> bool:
        before = len(self.sent)
        busy = super().step()
        for message in self.sent[before:]:
            if isinstance(message, (Granted, Failed)) and message.handle > FAR:
                self.answers.put(message)
        return busy

    def ask_prefix(self, prompt: bytes, start_token: int = 0) -> Granted | Failed:
        """Ask for a prefix as a front does, and return the answer."""
        self._ask_prefix("r", list(prompt), start_token)
        self.step()
        return self.answers.get_nowait()

    def grant(self, body: PrefillRequest | PrefixRequest) -> PrefillGrant:
        """Answer what a fetch asks for; called from its thread, while another steps this engine."""
        if isinstance(body, PrefillRequest):
            return self.grant_prefill(body.token_ids, body.start_token)
        self._ask_prefix(body.request_id, body.token_ids, body.start_token)
        answer = self.answers.get(timeout=60)
        if isinstance(answer, Failed):
            raise (AbsentError if answer.status == 404 else PeerError)(answer.message)
        return answer.grant

    def grant_prefill(self, prompt: list[int], start_token: int) -> PrefillGrant:
        """Queue a prefill for another."""
        self.requests += 1
        body = PrefillRequest(request_id="r", model="tiny", token_ids=prompt, start_token=start_token)
        message = StartPrefill(FAR + self.requests, body)
        offer, grant = self.offers.grant(message.subject, start_token, len(prompt))
        self.engine.inbox.put(PrefillOffered(message, offer))
        return grant

    def _ask_prefix(self, request_id: str, prompt: list[int], start_token: int) -> None:
        self.requests += 1
        body = PrefixRequest(request_id=request_id, model="tiny", token_ids=prompt, start_token=start_token)
        self.engine.inbox.put(StartPrefix(FAR + self.requests, body))


class FetchWithoutHttp(RemoteFetch):
    """A fetch that asks an engine of this process."""

    source: Source

    def _ask(self) -> PrefillGrant:
        return self.source.grant(self._body)

    def _release(self, grant: PrefillGrant) -> None:
        self.source.offers.cancel(grant.transfer_id)


class Destination(Bench):
    """An engine whose fetches go to a source, wherever they should go."""

    def __init__(self, model: Model, source: Source, **how: Any):
        super().__init__(model, **how)
        self.source = source
        self.connections = pull.Connections(PeerAuth())
        self.shared = FetchContext(self.offers._layout, self.connections, self.offers.counters, TRAFFIC)

    def prepare(self, sequence: Sequence, *, is_prefix: bool) -> Any:
        generate = sequence.request.generate
        kind = PrefixRequest if is_prefix else PrefillRequest
        body = kind(
            request_id=generate.request_id,
            model="tiny",
            token_ids=generate.token_ids,
            start_token=sequence.computed_tokens,
        )
        place, source = self.engine.runner.place(sequence.held), SourceApi("http://127.0.0.1:1", "", PeerAuth())
        fetch = FetchWithoutHttp(sequence.request.handle, body, source, place, self.shared)
        fetch.source = self.source
        self.fetches.append(fetch)
        return fetch

    def close(self) -> None:
        """Close the connections that were kept for the next transfer."""
        eventually(lambda: "fetch-data" not in transfer_threads(), "no destination receives")
        source = pull.SourceAddress("127.0.0.1", self.source.offers._data_port)
        while stream := self.connections.take(source):
            self.connections.drop(source, stream)

    def run_with(self, done: Callable[[], bool]) -> None:
        """Step both until that is so and both are at rest."""

        def is_at_rest() -> bool:
            if done() and not list(self.engine.requests) and not list(self.source.engine.requests):
                return True
            if not self.step() | self.source.step():
                time.sleep(0.001)
            return False

        eventually(is_at_rest, "both engines are at rest", poll=0)
