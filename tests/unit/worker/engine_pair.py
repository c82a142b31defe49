"""Two engines that are stepped by hand, and fetch from each other over real sockets; only HTTP is left out."""

import queue
import time
from collections.abc import Callable
from typing import Any

from prfaas.errors import PeerError
from prfaas.wire.engine import Failed, Granted, StartPrefill, StartPrefix
from prfaas.wire.prefill import PrefillGrant
from prfaas_worker.engine.events import Offered
from prfaas_worker.engine.sequences import Sequence
from prfaas_worker.models.base import Model
from prfaas_worker.transfer import connections
from prfaas_worker.transfer.door import Door
from prfaas_worker.transfer.fetch import AbsentError, Fetch, Wanted
from prfaas_worker.transfer.offers import Prompt
from prfaas_worker.transfer.pull import Shared
from prfaas_worker.transfer.sender import Sender, listen

from .engine_bench import TRAFFIC, Bench
from .transfer_bench import eventually, transfer_threads

FAR = 1_000_000
"""Handles of requests for another engine."""


class Giver(Bench):
    """An engine with a data port."""

    def __init__(self, model: Model, **how: Any):
        super().__init__(model, **how)
        listener = listen("127.0.0.1", 0)
        self.offers._data_port = listener.getsockname()[1]
        Sender(listener, self.offers, TRAFFIC)
        self.answers: queue.SimpleQueue[Granted | Failed] = queue.SimpleQueue()
        self.asked = 0

    def step(self) -> bool:
        said = len(self.said)
        busy = super().step()
        for message in self.said[said:]:
            if isinstance(message, (Granted, Failed)) and message.handle > FAR:
                self.answers.put(message)
        return busy

    def ask_prefix(self, prompt: bytes, start_token: int = 0) -> Granted | Failed:
        """Ask for a prefix as a front does, and return the answer."""
        self._ask_prefix("r", list(prompt), start_token)
        self.step()
        return self.answers.get_nowait()

    def grant(self, wanted: Wanted) -> PrefillGrant:
        """Answer what a fetch asks for; called from its thread, while another steps this engine."""
        if not wanted.is_prefix:
            return self.grant_prefill(wanted.token_ids, wanted.start_token)
        self._ask_prefix(wanted.request_id, wanted.token_ids, wanted.start_token)
        answer = self.answers.get(timeout=60)
        if isinstance(answer, Failed):
            raise (AbsentError if answer.status == 404 else PeerError)(answer.message)
        return answer.grant

    def grant_prefill(self, prompt: list[int], start_token: int) -> PrefillGrant:
        """Queue a prefill for another."""
        self.asked += 1
        message = StartPrefill(FAR + self.asked, "r", prompt, start_token)
        offer, grant = self.offers.grant(Prompt(message.handle, "r", len(prompt), start_token))
        self.engine.inbox.put(Offered(message, offer))
        return grant

    def _ask_prefix(self, request_id: str, prompt: list[int], start_token: int) -> None:
        self.asked += 1
        self.engine.inbox.put(StartPrefix(FAR + self.asked, request_id, prompt, start_token))


class FetchWithoutHttp(Fetch):
    """A fetch that asks an engine of this process."""

    giver: Giver

    def _ask(self) -> PrefillGrant:
        return self.giver.grant(self._wanted)

    def _release(self, grant: PrefillGrant) -> None:
        self.giver.offers.cancel(grant.transfer_id)


class Taker(Bench):
    """An engine whose fetches go to a giver, wherever they should go."""

    def __init__(self, model: Model, giver: Giver, **how: Any):
        super().__init__(model, **how)
        self.giver = giver
        self.connections = connections.Connections(Door())
        self.shared = Shared(self.connections, self.offers.counters, TRAFFIC)

    def new_fetch(self, sequence: Sequence, is_prefix: bool) -> Any:
        generate, offers = sequence.request.generation, self.offers
        wanted = Wanted(
            request_id=generate.request_id,
            model_name="tiny",
            url="http://127.0.0.1:1",
            token_ids=generate.token_ids,
            start_token=sequence.computed_tokens,
            cache_salt="",
            fingerprint=offers._fingerprint,
            groups=offers._groups,
            hidden_size=offers._hidden_size,
            is_prefix=is_prefix,
        )
        fetch = FetchWithoutHttp(wanted, self.engine._parts.runner.place(sequence.held), self.shared)
        fetch.giver = self.giver
        self.fetches.append(fetch)
        return fetch

    def close(self) -> None:
        """Close the connections that were kept for the next transfer."""
        eventually(lambda: "fetch-data" not in transfer_threads())
        giver = connections.Giver("127.0.0.1", self.giver.offers._data_port)
        while stream := self.connections.take(giver):
            self.connections.drop(giver, stream)

    def run_with(self, done: Callable[[], bool], seconds: float = 120) -> None:
        """Step both until that is so and both are at rest."""
        deadline = time.monotonic() + seconds
        while not done() or list(self.engine.requests) or list(self.giver.engine.requests):
            assert time.monotonic() < deadline, "it takes too long"
            busy = self.step() | self.giver.step()
            if not busy:
                time.sleep(0.001)
