"""The step loop on the real model, without sockets: what the front hears, and that what ends leaves nothing behind."""

import gc
import itertools
import weakref
from typing import Any

import pytest
import torch

from prfaas.errors import PeerError, PrfaasError
from prfaas.wire.engine import Cancel, Failed, Generate, Sampling, Started, ToFront, Tokens
from prfaas.wire.transfer import Done
from prfaas_worker.engine.loop import Engine, FetchEnded, Gauges
from prfaas_worker.engine.runner import Runner
from prfaas_worker.engine.schedule import Limits
from prfaas_worker.engine.sequences import Request
from prfaas_worker.models import load_model
from prfaas_worker.models.base import Model, SequenceCache
from prfaas_worker.transfer.fetch import Fetched

GREEDY = Sampling(0.0, 1.0, 0, 0)


@pytest.fixture(scope="module")
def model() -> Model:
    return load_model("builtin:kimi-linear-tiny", 1)[0]


class FetchByHand:
    """A fetch whose end the test decides."""

    def __init__(self, request: Request):
        self.request = request
        self.cancelled = False

    def start(self, on_end: Any) -> None:
        self.on_end = on_end

    def cancel(self) -> None:
        self.cancelled = True


class Bench:
    """An engine that is stepped by hand."""

    def __init__(self, model: Model, max_running: int = 8, max_waiting: int = 3, chunk_tokens: int = 64):
        self.said: list[ToFront] = []
        self.fetches: list[FetchByHand] = []
        limits = Limits(max_running, chunk_tokens)
        self.engine = Engine(Runner(model), limits, max_waiting, self.new_fetch, self.said.append)
        self._handles = itertools.count(1)

    def new_fetch(self, request: Request) -> Any:
        self.fetches.append(FetchByHand(request))
        return self.fetches[-1]

    def ask(self, prompt: bytes, **fields: Any) -> int:
        handle = next(self._handles)
        known = {"choices": 1, "max_tokens": 6, "sampling": GREEDY, "logprobs": -1, "prefill_url": ""}
        self.engine.inbox.put(Generate(handle=handle, request_id="r", token_ids=list(prompt), **(known | fields)))
        return handle

    def step(self) -> bool:
        return self.engine.step(wait=False)

    def run(self) -> None:
        while self.step():
            pass

    def caches(self, handle: int) -> list[weakref.ref[SequenceCache]]:
        request = self.engine.requests.get(handle)
        held = [request.cache, *(choice.cache for choice in request.choices)] if request else []
        return [weakref.ref(cache) for cache in held if cache]

    def tokens(self, handle: int, choice: int = 0) -> list[int]:
        mine = [m for m in self.said if isinstance(m, Tokens) and (m.handle, m.choice) == (handle, choice)]
        return [token for message in mine for token in message.token_ids]

    def ends(self, handle: int) -> list[str]:
        return [m.finish_reason for m in self.said if isinstance(m, Tokens) and m.handle == handle and m.finish_reason]


def alone(model: Model, prompt: bytes, count: int) -> list[int]:
    """Greedy tokens straight from the model: one prefill, one step a token."""
    cache = model.new_cache()
    with torch.inference_mode():
        logits = model.logits(model.prefill(torch.tensor(list(prompt)), cache))
        tokens = [int(logits.argmax())]
        while len(tokens) < count:
            tokens.append(int(model.decode(torch.tensor(tokens[-1:]), [cache])[0].argmax()))
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
def test_a_cancelled_request_frees_its_caches_wherever_it_stands(model: Model, steps: int):
    bench = Bench(model)
    handle = bench.ask(b"z" * 100, choices=2, max_tokens=50)
    for _ in range(steps):
        bench.step()
    request = bench.engine.requests.get(handle)
    caches = (
        [weakref.ref(cache) for cache in [request.cache, *(c.cache for c in request.choices)] if cache]
        if request
        else []
    )
    del request
    bench.engine.inbox.put(Cancel(handle))
    bench.step()
    gc.collect()
    assert [cache for cache in caches if cache() is not None] == []
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


def fetched(model: Model, request: Request, prompt: bytes) -> Fetched:
    """What a fetch would bring: the prompt prefilled into the request's cache."""
    with torch.inference_mode():
        hidden = model.prefill(torch.tensor(list(prompt)), request.admitted_cache)
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
    fetch.on_end(fetched(model, fetch.request, prompt))
    bench.run()
    assert bench.said[0] == Started(handle, 0, 7, 0.5, 0.25, 0.125)
    assert bench.tokens(handle) == alone(model, prompt, 6)
    assert bench.engine.gauges.prompt_tokens == 0


def test_a_failed_fetch_is_a_502_and_frees_the_cache(model: Model):
    bench = Bench(model)
    handle = bench.ask(b"x", prefill_url="http://127.0.0.1:1")
    bench.run()
    error: PrfaasError = PeerError("the link is down")
    bench.fetches[0].on_end(error)
    bench.run()
    assert bench.said == [Failed(handle, 502, "prefill_failed", "the link is down")]
    assert bench.engine.requests.get(handle) is None


def test_a_cancelled_fetch_is_told_and_its_late_result_ignored(model: Model):
    bench = Bench(model)
    handle = bench.ask(b"x", prefill_url="http://127.0.0.1:1")
    bench.run()
    bench.engine.inbox.put(Cancel(handle))
    bench.run()
    (fetch,) = bench.fetches
    assert fetch.cancelled
    bench.engine.inbox.put(FetchEnded(handle, fetched(model, fetch.request, b"x")))
    bench.run()
    assert bench.said == []
