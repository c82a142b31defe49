"""The step loop on the real model, without sockets: what the front hears, and that what ends leaves nothing behind."""

import itertools
import json
import time
from typing import Any

import pytest
import torch

from prfaas.errors import PeerError, PrfaasError
from prfaas.wire.engine import Cancel, Failed, Generate, Grammar, Sampling, Started, ToFront, Tokens
from prfaas.wire.transfer import Done
from prfaas_worker.cache.cache import HybridCache
from prfaas_worker.cache.memory import CacheGeometry, CacheMemory
from prfaas_worker.engine import schedule
from prfaas_worker.engine.grammar import Grammars, Vocabulary
from prfaas_worker.engine.loop import Engine, Gauges, Parts
from prfaas_worker.engine.profile import Profiler
from prfaas_worker.engine.runner import Runner
from prfaas_worker.engine.sequences import Sequence
from prfaas_worker.models import load_model
from prfaas_worker.models.base import Batch, Chunk, Model
from prfaas_worker.models.solo import Solo
from prfaas_worker.transfer.fetch import Fetched

GREEDY = Sampling(0.0, 1.0, 0, 0)
# Bytes, and tokens that end an answer, as the built-in model has them.
GRAMMARS = Grammars(lambda: Vocabulary([bytes([i]) for i in range(256)], frozenset(range(256, 264)), (257, 262), 264))


@pytest.fixture(scope="module")
def model() -> Model:
    return load_model("builtin:kimi-linear-tiny", 1)[0]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of 64 tokens, so that short prompts take several steps."""
    monkeypatch.setitem(schedule.BUDGETS, "mixed", schedule.Budgets(64, 64))


class FetchByHand:
    """A fetch whose end the test decides."""

    def __init__(self, sequence: Sequence):
        self.sequence = sequence
        self.cancelled = False

    def start(self, on_end: Any) -> None:
        self.on_end = on_end

    def cancel(self) -> None:
        self.cancelled = True


class Bench:
    """An engine that is stepped by hand."""

    def __init__(self, model: Model, max_running: int = 8, max_waiting: int = 3, num_pages: int = 256):
        self.said: list[ToFront] = []
        self.fetches: list[FetchByHand] = []
        self.memory = CacheMemory(
            CacheGeometry(model.layers), num_pages=num_pages, num_slots=max_running, max_context=num_pages * 64
        )
        parts = Parts(
            runner=Runner(model, self.memory),
            cache=HybridCache(self.memory),
            events=[],
            grammars=GRAMMARS,
            profiler=Profiler(1, 1, lambda _profile: None),
            new_fetch=self.new_fetch,
            answer=self.said.extend,
        )
        self.engine = Engine(parts, role="mixed", max_waiting=max_waiting)
        self._handles = itertools.count(1)

    def new_fetch(self, sequence: Sequence) -> Any:
        self.fetches.append(FetchByHand(sequence))
        return self.fetches[-1]

    def ask(self, prompt: bytes, **fields: Any) -> int:
        handle = next(self._handles)
        known = {"choices": 1, "max_tokens": 6, "sampling": GREEDY, "logprobs": -1, "prefill_url": ""}
        self.engine.inbox.put(Generate(handle=handle, request_id="r", token_ids=list(prompt), **(known | fields)))
        return handle

    def step(self) -> bool:
        busy = self.engine.step(wait=False)
        self.engine.cache.check_integrity()
        return busy

    def run(self) -> None:
        while self.step():
            pass

    def tokens(self, handle: int, choice: int = 0) -> list[int]:
        mine = [m for m in self.said if isinstance(m, Tokens) and (m.handle, m.choice) == (handle, choice)]
        return [token for message in mine for token in message.token_ids]

    def ends(self, handle: int) -> list[str]:
        return [m.finish_reason for m in self.said if isinstance(m, Tokens) and m.handle == handle and m.finish_reason]

    def assert_nothing_is_held(self) -> None:
        """Every slot is free, and every page free or only cached."""
        cache = self.engine.cache
        assert cache.free_slots == self.memory.num_slots
        assert cache.free_pages == self.memory.num_pages
        assert cache.stats().used_pages == 0


def alone(model: Model, prompt: bytes, count: int) -> list[int]:
    """Greedy tokens straight from the model: one prefill, one step a token."""
    bound = model._memory if hasattr(model, "_memory") else None
    solo = Solo(model, slots=1, tokens=len(prompt) + count)
    sequence = solo.new()
    with torch.inference_mode():
        logits = model.logits(solo.prefill(torch.tensor(list(prompt)), sequence))
        tokens = [int(logits.argmax())]
        while len(tokens) < count:
            tokens.append(int(solo.decode(torch.tensor(tokens[-1:]), [sequence])[0].argmax()))
    if bound is not None:
        model.bind(bound)
    return tokens


def test_chunked_prefill_and_batched_decode_give_the_models_own_tokens(model: Model):
    bench = Bench(model, max_waiting=4)
    prompts = [b"def f(x):\n", b"import os\n" * 20, b"class A:\n    " * 9, b"#"]
    handles = [bench.ask(prompt, max_tokens=12) for prompt in prompts]
    bench.run()
    for handle, prompt in zip(handles, prompts, strict=True):
        expected = alone(model, prompt, 12)
        cut = next((at for at, token in enumerate(expected) if token in model.eos_token_ids), 12)
        assert bench.tokens(handle) == expected[:cut]
        assert bench.ends(handle) == ["length" if cut == 12 else "stop"]


def test_a_stop_token_ends_a_choice_and_is_not_text(model: Model, monkeypatch: pytest.MonkeyPatch):
    prompt = b"def f(x):\n"
    expected = alone(model, prompt, 8)
    stop = expected[4]
    monkeypatch.setattr(model, "eos_token_ids", frozenset({stop}))
    bench = Bench(model)
    handle = bench.ask(prompt, max_tokens=8)
    bench.run()
    assert bench.tokens(handle) == expected[: expected.index(stop)]
    assert bench.ends(handle) == ["stop"]


def test_started_comes_once_before_the_first_token(model: Model):
    bench = Bench(model)
    bench.ask(b"x" * 150, choices=2)
    assert [type(m) for m in bench.said] == []
    bench.run()
    kinds = [type(message) for message in bench.said]
    assert kinds[0] is Started
    assert kinds.count(Started) == 1
    assert bench.said[0].prefill_seconds > 0


def test_choices_are_independent_of_each_other(model: Model):
    bench = Bench(model)
    sampling = Sampling(1.0, 1.0, 0, 42)
    three = bench.ask(b"def f(", choices=3, max_tokens=10, sampling=sampling)
    one = bench.ask(b"def f(", choices=1, max_tokens=10, sampling=sampling)
    bench.run()
    texts = [bench.tokens(three, choice) for choice in range(3)]
    assert texts[0] == bench.tokens(one)
    assert texts[0] != texts[1] != texts[2]


def test_every_choice_begins_from_its_own_prompt_whatever_is_computed_beside_it(model: Model):
    """Two choices of a prompt that ends, beside a chunk of one that does not: as many draws as rows, but other ones."""
    bench = Bench(model)
    short, _ = bench.ask(b"def f(", choices=2, max_tokens=3), bench.ask(b"y" * 200, max_tokens=3)
    bench.run()
    expected = alone(model, b"def f(", 3)
    assert [bench.tokens(short, choice) for choice in range(2)] == [expected] * 2


def test_a_long_prompt_delays_a_running_stream_by_one_chunk_only(model: Model):
    bench = Bench(model)
    stream = bench.ask(b"def f(", max_tokens=40)
    while len(bench.tokens(stream)) < 2:
        bench.step()
    bench.ask(b"y" * 64 * 10)
    for _ in range(10):
        before = len(bench.tokens(stream))
        bench.step()
        assert len(bench.tokens(stream)) == before + 1


@pytest.mark.parametrize("steps", [0, 1, 2, 5])
def test_a_cancelled_request_frees_its_memory_wherever_it_stands(model: Model, steps: int):
    bench = Bench(model)
    handle = bench.ask(b"z" * 100, choices=2, max_tokens=50)
    for _ in range(steps):
        bench.step()
    bench.engine.inbox.put(Cancel(handle))
    bench.step()
    bench.assert_nothing_is_held()
    assert bench.engine.requests.get(handle) is None
    assert bench.engine.gauges[:4] == Gauges()[:4]
    said = len(bench.said)
    bench.run()
    assert len(bench.said) == said


def test_one_choice_can_be_cancelled_and_the_others_go_on(model: Model):
    bench = Bench(model)
    handle = bench.ask(b"def f(", choices=2, max_tokens=9, sampling=Sampling(1.0, 1.0, 0, 7))
    while not bench.tokens(handle, 1):
        bench.step()
    bench.engine.inbox.put(Cancel(handle, 0))
    bench.run()
    assert len(bench.tokens(handle, 0)) < 9
    assert len(bench.tokens(handle, 1)) == 9 or "stop" in bench.ends(handle)
    assert bench.engine.requests.get(handle) is None


def test_cancelling_what_is_over_or_unknown_does_nothing(model: Model):
    bench = Bench(model)
    handle = bench.ask(b"x", max_tokens=1)
    bench.run()
    for message in (Cancel(handle), Cancel(handle, 0), Cancel(999)):
        bench.engine.inbox.put(message)
    bench.run()
    assert bench.engine.gauges.requests_running == 0


def test_beyond_what_may_wait_a_request_is_told_so(model: Model):
    bench = Bench(model, max_running=1, max_waiting=2)
    handles = [bench.ask(b"x", max_tokens=2) for _ in range(4)]
    bench.step()
    failed = [message for message in bench.said if isinstance(message, Failed)]
    assert [(message.handle, message.status, message.code) for message in failed] == [
        (handles[2], 503, "overloaded"),
        (handles[3], 503, "overloaded"),
    ]
    bench.run()
    assert [bool(bench.ends(handle)) for handle in handles] == [True, True, False, False]


def test_a_grammar_is_followed_and_ends_the_answer(model: Model):
    grammar, sampling = Grammar("regex", r'\{"a": [1-9][0-9]{0,2}\}'), Sampling(1.0, 1.0, 0, 3)
    bench = Bench(model)
    handle = bench.ask(b"def f(", grammar=grammar, max_tokens=400, sampling=sampling, choices=2)
    deadline = time.monotonic() + 30
    while len(bench.ends(handle)) < 2:
        assert time.monotonic() < deadline
        bench.step()
    for choice in range(2):
        assert json.loads(bytes(bench.tokens(handle, choice)))["a"] < 1000
    assert bench.ends(handle) == ["stop", "stop"]
    bench.assert_nothing_is_held()


def test_a_request_that_cannot_be_drawn_fails_alone(model: Model):
    bench = Bench(model)
    wrong = bench.ask(b"x", sampling=Sampling(0.0, 1.0, 0, 0, logit_bias=((999, 1.0),)))
    none_left = bench.ask(b"x", sampling=Sampling(0.0, 1.0, 0, 0, logit_bias=tuple((t, -1e9) for t in range(264))))
    fine = bench.ask(b"def f(")
    bench.run()
    failed = {message.handle: message for message in bench.said if isinstance(message, Failed)}
    assert failed.keys() <= {wrong, none_left}
    assert (failed[wrong].status, failed[wrong].code) == (400, "invalid_request")
    assert "token 999" in failed[wrong].message
    assert bench.tokens(fine) == alone(model, b"def f(", 6)
    bench.assert_nothing_is_held()


def test_ends_of_the_requests_own_and_a_least_length_are_kept_to(model: Model):
    prompt = b"def f(x):\n"
    free = alone(model, prompt, 12)
    bench = Bench(model)
    stopped = bench.ask(prompt, max_tokens=12, stop_token_ids=(free[5],))
    longer = bench.ask(prompt, max_tokens=12, stop_token_ids=(free[5],), min_tokens=9)
    bench.run()
    assert bench.tokens(stopped) == free[: free.index(free[5])]
    assert len(bench.tokens(longer)) >= 9
    assert bench.tokens(longer)[:9].count(free[5]) == 0


def fetched(model: Model, sequence: Sequence) -> Fetched:
    """What a fetch would bring: the prompt prefilled into the sequence's memory."""
    tokens = torch.tensor(sequence.token_ids)
    start = sequence.computed_tokens
    with torch.inference_mode():
        (hidden,) = model.forward(Batch(tokens[start:], (Chunk(sequence.held.slot, start, len(tokens) - start),)))
    done = Done(payload_bytes=7, prefill_seconds=0.5, first_byte_seconds=0.125)
    return Fetched(hidden, done, 7, 0.25)


def test_a_fetched_prompt_continues_as_a_local_one(model: Model):
    bench = Bench(model)
    prompt = b"import sys\n"
    handle = bench.ask(prompt, prefill_url="http://127.0.0.1:1")
    bench.run()
    (fetch,) = bench.fetches
    assert bench.said == []
    assert bench.engine.gauges.requests_running == 1
    fetch.on_end(fetched(model, fetch.sequence))
    bench.run()
    started = bench.said[0]
    assert isinstance(started, Started)
    assert started == Started(handle, 0, 7, 0.5, 0.25, 0.125, started.queue_seconds)
    assert bench.tokens(handle) == alone(model, prompt, 6)
    assert bench.engine.gauges.prompt_tokens == 0
    bench.assert_nothing_is_held()


def test_a_failed_fetch_is_a_502_and_frees_the_memory(model: Model):
    bench = Bench(model)
    handle = bench.ask(b"x", prefill_url="http://127.0.0.1:1")
    bench.run()
    error: PrfaasError = PeerError("the link is down")
    bench.fetches[0].on_end(error)
    bench.run()
    assert bench.said == [Failed(handle, 502, "prefill_failed", "the link is down")]
    assert bench.engine.requests.get(handle) is None
    bench.assert_nothing_is_held()


def test_a_cancelled_fetch_keeps_its_memory_until_its_thread_has_ended(model: Model):
    bench = Bench(model)
    handle = bench.ask(b"x", prefill_url="http://127.0.0.1:1")
    bench.run()
    bench.engine.inbox.put(Cancel(handle))
    bench.run()
    (fetch,) = bench.fetches
    assert fetch.cancelled
    assert bench.engine.cache.stats().used_pages == 1, "the thread may still write into it"
    fetch.on_end(fetched(model, fetch.sequence))
    bench.run()
    assert bench.said == []
    bench.assert_nothing_is_held()


def test_sequences_that_outgrow_the_memory_take_turns_and_say_what_they_would_alone(model: Model):
    """Three streams of up to four pages on five: the last one gives way, and comes back as if nothing had been."""
    bench = Bench(model, num_pages=5)
    prompts = [b"def f(x):\n    return", b"import os\n\n\nclass A", b"for i in range("]
    handles = [bench.ask(prompt, max_tokens=220, sampling=Sampling(1.0, 1.0, 0, 5)) for prompt in prompts]
    bench.run()
    assert bench.engine.gauges.preemptions > 0
    bench.assert_nothing_is_held()
    roomy = Bench(model)
    expected = [roomy.ask(prompt, max_tokens=220, sampling=Sampling(1.0, 1.0, 0, 5)) for prompt in prompts]
    roomy.run()
    assert roomy.engine.gauges.preemptions == 0
    for handle, other in zip(handles, expected, strict=True):
        assert bench.tokens(handle) == roomy.tokens(other)


def test_choices_share_their_prompts_pages(model: Model):
    bench = Bench(model)
    handle = bench.ask(b"x" * 200, choices=4, max_tokens=30, sampling=Sampling(1.0, 1.0, 0, 1))
    while not bench.tokens(handle, 3):
        bench.step()
    assert bench.engine.cache.stats().used_pages == 3 + 4
    bench.run()
    bench.assert_nothing_is_held()


def test_a_step_without_memory_fails_its_prompts_and_computes_its_decodes_anew(
    model: Model, monkeypatch: pytest.MonkeyPatch
):
    bench = Bench(model)
    stream = bench.ask(b"def f(", max_tokens=20)
    while len(bench.tokens(stream)) < 5:
        bench.step()
    real = model.forward

    def forward(batch: Batch, on_layer: Any = None) -> torch.Tensor:
        if batch.chunks:
            bench.memory.slots.fill_(7)  # what it leaves behind is undefined
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(batch, on_layer)

    monkeypatch.setattr(model, "forward", forward)
    refused = bench.ask(b"y" * 90)
    bench.step()
    bench.step()
    monkeypatch.undo()
    bench.run()
    (failed,) = [message for message in bench.said if isinstance(message, Failed)]
    assert (failed.handle, failed.status, failed.code) == (refused, 503, "overloaded")
    expected = alone(model, b"def f(", 20)
    cut = next((at for at, token in enumerate(expected) if token in model.eos_token_ids), 20)
    assert bench.tokens(stream) == expected[:cut]
    bench.assert_nothing_is_held()


def test_a_step_without_memory_ends_all_choices_of_a_prompt_in_it(model: Model, monkeypatch: pytest.MonkeyPatch):
    """One choice decodes beside another that has lost its memory and is computed anew."""
    bench = Bench(model)
    handle = bench.ask(b"def f(", choices=2, max_tokens=50)
    while not bench.tokens(handle, 1):
        bench.step()
    request = bench.engine.requests.get(handle)
    assert request is not None
    bench.engine._preempt(request.sequences[1])
    bench.engine.cache.reset()
    bench.step()  # admits it again; from the next step on it is a chunk

    def forward(batch: Batch, on_layer: Any = None) -> torch.Tensor:
        assert batch.chunks
        assert batch.decodes is not None
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(model, "forward", forward)
    bench.step()
    assert [type(message) for message in bench.said if message.handle == handle].count(Failed) == 1
    bench.assert_nothing_is_held()


class Parrot:
    """A model that computes nothing: it says token after token by chance."""

    def __init__(self, model: Model):
        self.layers, self.fingerprint, self.device = model.layers, model.fingerprint, model.device
        self.eos_token_ids, self.vocab_size = frozenset({1}), 264
        self.chance = torch.Generator().manual_seed(2)

    def bind(self, memory: CacheMemory) -> None:
        pass

    def forward(self, batch: Batch, _on_layer: Any = None) -> torch.Tensor:
        return torch.rand(batch.outputs, 264, generator=self.chance)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden


def test_ten_thousand_cancels_at_every_stage_leave_no_page_held(model: Model):
    """Requests of every kind are cancelled, whole or by choice, at any time while others go on."""
    parrot: Any = Parrot(model)
    bench = Bench(parrot, max_waiting=10_000, num_pages=48)
    chance = torch.Generator().manual_seed(1)

    def number(below: int) -> int:
        return int(torch.randint(below, (1,), generator=chance))

    cancelled, alive = 0, []
    while cancelled < 10_000:
        for _ in range(number(60)):
            remote = "http://127.0.0.1:1" if number(4) == 0 else ""
            fields = {"choices": 1 + number(3), "max_tokens": 1 + number(8), "prefill_url": remote}
            alive.append(bench.ask(b"q" * (1 + number(150)), **fields))
        for _ in range(number(3)):
            bench.engine.step(wait=False)
        for fetch in bench.fetches:
            fetch.on_end(PeerError("gone") if number(2) else fetched(parrot, fetch.sequence))
        bench.fetches.clear()
        for _ in range(len(alive) - 20):
            handle = alive.pop(number(len(alive)))
            bench.engine.inbox.put(Cancel(handle, number(3)) if number(5) == 0 else Cancel(handle))
            cancelled += 1
    for handle in alive:
        bench.engine.inbox.put(Cancel(handle))
    while list(bench.engine.requests):
        bench.step()
        for fetch in bench.fetches:
            fetch.on_end(PeerError("gone"))
        bench.fetches.clear()
    bench.assert_nothing_is_held()
