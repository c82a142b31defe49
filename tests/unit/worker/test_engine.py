"""The step loop on the real model, without sockets: what the front hears of every kind of request."""

import pytest

from prfaas.wire.engine import Cancel, Failed, Sampling, Started
from prfaas_worker.models.base import Model

from .engine_bench import Bench, generate

pytestmark = [pytest.mark.system, pytest.mark.usefixtures("small_chunks")]


def test_chunked_prefill_and_batched_decode_give_the_models_own_tokens(model: Model):
    bench = Bench(model, max_waiting=4)
    prompts = [b"def f(x):\n", b"import os\n" * 20, b"class A:\n    " * 9, b"#"]
    handles = [bench.ask(prompt, max_tokens=12) for prompt in prompts]
    bench.run()
    for handle, prompt in zip(handles, prompts, strict=True):
        expected = generate(model, prompt, 12)
        cut = next((at for at, token in enumerate(expected) if token in model.eos_token_ids), 12)
        assert bench.tokens(handle) == expected[:cut]
        assert bench.ends(handle) == ["length" if cut == 12 else "stop"]


def test_started_comes_once_before_the_first_token(model: Model):
    bench = Bench(model)
    bench.ask(b"x" * 150, choices=2)
    assert [type(m) for m in bench.sent] == []
    bench.run()
    kinds = [type(message) for message in bench.sent]
    assert kinds[0] is Started
    assert kinds.count(Started) == 1
    assert bench.sent[0].prefill_seconds > 0


def test_every_choice_begins_from_its_own_prompt_whatever_is_computed_beside_it(model: Model):
    """Two choices of a prompt that ends, beside a chunk of one that does not: as many draws as rows, but other ones."""
    bench = Bench(model)
    short, _ = bench.ask(b"def f(", choices=2, max_tokens=3), bench.ask(b"y" * 200, max_tokens=3)
    bench.run()
    expected = generate(model, b"def f(", 3)
    assert [bench.tokens(short, choice) for choice in range(2)] == [expected] * 2


def test_one_choice_can_be_cancelled_and_the_others_continue(model: Model):
    bench = Bench(model)
    handle = bench.ask(b"def f(", choices=2, max_tokens=9, sampling=Sampling(1.0, 1.0, 0, 7))
    while not bench.tokens(handle, 1):
        bench.step()
    bench.engine.inbox.put(Cancel(handle, 0))
    bench.run()
    assert len(bench.tokens(handle, 0)) < 9
    assert len(bench.tokens(handle, 1)) == 9 or "stop" in bench.ends(handle)
    assert bench.engine.requests.get(handle) is None


def test_refuses_a_request_beyond_what_may_wait(model: Model):
    bench = Bench(model, max_running=1, max_waiting=2)
    handles = [bench.ask(b"x", max_tokens=2) for _ in range(4)]
    bench.step()
    failed = [message for message in bench.sent if isinstance(message, Failed)]
    assert [(message.handle, message.status, message.code) for message in failed] == [
        (handles[2], 503, "overloaded"),
        (handles[3], 503, "overloaded"),
    ]
    bench.run()
    assert [bool(bench.ends(handle)) for handle in handles] == [True, True, False, False]


def test_a_request_that_cannot_be_drawn_fails_alone(model: Model):
    bench = Bench(model)
    wrong = bench.ask(b"x", sampling=Sampling(0.0, 1.0, 0, 0, logit_bias=((999, 1.0),)))
    none_left = bench.ask(b"x", sampling=Sampling(0.0, 1.0, 0, 0, logit_bias=tuple((t, -1e9) for t in range(264))))
    fine = bench.ask(b"def f(")
    bench.run()
    failed = {message.handle: message for message in bench.sent if isinstance(message, Failed)}
    assert failed.keys() <= {wrong, none_left}
    assert (failed[wrong].status, failed[wrong].code) == (400, "invalid_request")
    assert "token 999" in failed[wrong].message
    assert bench.tokens(fine) == generate(model, b"def f(", 6)
    bench.assert_nothing_is_held()
