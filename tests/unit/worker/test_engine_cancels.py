"""Ten thousand cancels, whole or by choice, at every stage of a request while others run: nothing stays held."""

from collections import Counter
from random import Random
from typing import Any

import pytest

from prfaas.errors import PeerError, PrfaasError
from prfaas.wire.engine import Cancel
from prfaas.wire.prefill import LegParams
from prfaas_transfer.mover.messages import Fetched
from prfaas_worker.engine.sequences import Phase
from prfaas_worker.models.base import Model

from .engine_bench import NAMED, Bench, FetchByHand, Parrot, prefix_fetched

pytestmark = pytest.mark.system

CANCELS = 10_000
PREFIX = LegParams(role="destination", **NAMED, tokens=192)
WHOLE = LegParams(role="destination", **NAMED)
STAGES = {
    "arriving",
    "queued",
    "prefilling",
    "fetching",
    "fetching a prefix",
    "joining",
    "decoding",
    "one of several choices",
    "preempted",
    "ended",
}


def stage(bench: Bench, handle: int) -> str:
    """Where a request stands."""
    request = bench.engine.requests.get(handle)
    if request is None:
        return "ended" if handle in bench.seen else "arriving"
    phases = {sequence.phase for sequence in request.sequences}
    if Phase.JOINING in phases:
        return "joining"
    if Phase.FETCHING in phases:
        return "fetching" if request.is_remote else "fetching a prefix"
    if Phase.WAITING in phases:
        return "queued" if request.queue_seconds is None else "preempted"
    if not request.started:
        return "prefilling"
    return "one of several choices" if len(request.sequences) > 1 else "decoding"


class Crowd(Bench):
    """Requests of every kind on a small memory, in an order that chance gives and repeats."""

    def __init__(self, model: Any):
        super().__init__(model, max_running=8, max_waiting=CANCELS, num_pages=24)
        self.model, self.chance = model, Random(1)
        self.alive: list[int] = []
        self.last = b"x" * 200
        """Wanted again while it is fetched: that is joined."""
        self.seen: set[int] = set()

    def arrive(self) -> None:
        number = self.chance.randrange
        prompt = bytes([number(40)]) * (1 + number(240))
        fields: dict[str, Any] = {"choices": 1 + number(3), "max_tokens": 1 + number(200 if number(3) else 4)}
        if number(4) == 0:
            fields["leg"] = WHOLE
        elif number(3) == 0:
            prompt = bytes([40 + number(30)]) * 200 if number(3) == 0 else self.last
            fields["leg"], self.last = PREFIX, prompt
        self.alive.append(self.ask(prompt, **fields))

    def others_go_on(self) -> None:
        """Let threads come back with what they were sent for."""
        for fetch in self.fetches:
            fetch.on_end(self.result_of(fetch))
        self.fetches.clear()

    def result_of(self, fetch: FetchByHand) -> Fetched | PrfaasError:
        """What becomes of a fetch."""
        if self.chance.randrange(2):
            return PeerError("gone")
        leg, goal = fetch.sequence.request.open_leg, len(fetch.sequence.token_ids) - 1
        assert leg is not None
        is_exact = self.chance.randrange(3) > 0
        return prefix_fetched(self.model, fetch.sequence, leg.tokens or goal, is_exact=is_exact)

    def step(self) -> bool:
        self.seen.update(self.alive)
        return self.engine.step(wait=False)

    def preempt(self) -> None:
        """Take the memory of a running sequence, as the schedule does when pages are short."""
        running = [one for one in self.engine.requests.sequences() if one.phase is Phase.RUNNING]
        if running:
            self.engine._preempt(self.chance.choice(running))

    def cancel(self, stages: Counter[str]) -> None:
        """Cancel a request at a random stage: all stages alike, however few requests are there."""
        standing: dict[str, list[int]] = {}
        for handle in self.alive:
            standing.setdefault(stage(self, handle), []).append(handle)
        at = self.chance.choice(sorted(standing))
        handle, by_choice = self.chance.choice(standing[at]), self.chance.randrange(5) == 0
        stages[at] += 1
        self.engine.inbox.put(Cancel(handle, self.chance.randrange(3)) if by_choice else Cancel(handle))
        if at == "ended" or not by_choice:
            self.alive.remove(handle)


@pytest.mark.usefixtures("small_chunks")
def test_ten_thousand_cancels_at_every_stage_leave_no_page_held(model: Model):
    crowd, stages = Crowd(Parrot(model)), Counter[str]()
    while stages.total() < CANCELS:
        for _ in range(crowd.chance.randrange(12)):
            crowd.arrive()
        for _ in range(crowd.chance.randrange(5)):
            crowd.step()
        crowd.preempt()
        for _ in range(len(crowd.alive) - 20):
            crowd.cancel(stages)
        if crowd.chance.randrange(2):
            crowd.others_go_on()
    for handle in crowd.alive:
        crowd.engine.inbox.put(Cancel(handle))
    while list(crowd.engine.requests):
        crowd.step()
        crowd.others_go_on()
        crowd.engine.cache.check_integrity()
    crowd.assert_nothing_is_held()
    assert stages.keys() == STAGES
    assert min(stages.values()) >= 100, stages
