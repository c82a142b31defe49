"""What two engines have of each other's caches, over real sockets: bit by bit what they would have computed themselves;
and nothing stays held, however it ends.
"""

from collections.abc import Iterator

import pytest
import torch

from prfaas.kvindex.blocks import BlockChain, chain_root
from prfaas.wire.engine import Failed, Granted, Started
from prfaas_transfer import leases
from prfaas_worker.engine import schedule
from prfaas_worker.engine.remote import RemoteCaches
from prfaas_worker.engine.sequences import Phase, Sequence
from prfaas_worker.models import load_model
from prfaas_worker.models.base import Model

from .engine_bench import generate
from .engine_pair import Destination, Source

pytestmark = pytest.mark.system

SYSTEM = (b"You are a careful assistant that answers in Python. " * 5)[:192]


@pytest.fixture(scope="module")
def models() -> tuple[Model, Model]:
    """Each engine has its own, as each process does."""
    first, second = (load_model("builtin:kimi-linear-tiny", 1)[0] for _ in range(2))
    return first, second


@pytest.fixture(autouse=True)
def long_leases(monkeypatch: pytest.MonkeyPatch) -> None:
    """No lease ends because a machine takes long for the steps of an engine."""
    monkeypatch.setattr(leases, "LEASE_SECONDS", 600)


@pytest.fixture
def pair(models: tuple[Model, Model]) -> Iterator[tuple[Source, Destination]]:
    source = Source(models[0], num_pages=64)
    destination = Destination(models[1], source, num_pages=64)
    yield source, destination
    destination.close()
    source.assert_nothing_is_held()
    destination.assert_nothing_is_held()


def prompt_of(tail: bytes) -> bytes:
    return SYSTEM + tail + b" and so on until the end"


def teach(bench: Source | Destination, prompt: bytes) -> None:
    """Let an engine serve a prompt, so that its states and rows are cached."""
    bench.ask(prompt, max_tokens=1)
    bench.run()


def find_started(bench: Destination, handle: int) -> Started:
    return next(one for one in bench.sent if isinstance(one, Started) and one.handle == handle)


def test_a_prefix_of_another_engine_is_bit_by_bit_what_is_computed_here(pair, models):
    source, destination = pair
    teach(source, SYSTEM + b"x")
    prompt = prompt_of(b"first")
    handle = destination.ask(prompt, prefix_url="http://127.0.0.1:1", logprobs=3)
    destination.run_with(lambda: bool(destination.ends(handle)))
    assert destination.tokens(handle) == generate(models[1], prompt, 6)
    assert find_started(destination, handle).cached_tokens == len(SYSTEM)
    assert destination.engine.stats.prompt_tokens == len(prompt) - len(SYSTEM)
    # The same rows and states, as the two caches hold them.
    rows = [bench.memory.pages[pages_of(bench, prompt)] for bench in pair]
    assert torch.equal(rows[0], rows[1])
    states = [bench.memory.pages[[*state_of(bench, prompt)]] for bench in pair]
    assert torch.equal(states[0], states[1])


def chain_of(bench: Source | Destination, prompt: bytes) -> list[bytes]:
    chain = BlockChain(chain_root(bench.engine.runner.model.fingerprint, ""))
    chain.extend(list(prompt))
    return chain.hashes


def pages_of(bench: Source | Destination, prompt: bytes) -> list[int]:
    """Pages of the system prompt's rows."""
    return bench.engine.cache._blocks.match(chain_of(bench, prompt), 3).pages


def state_of(bench: Source | Destination, prompt: bytes) -> tuple[int, ...]:
    return bench.engine.cache._blocks.state_pages(chain_of(bench, prompt)[2])


def test_rows_that_are_here_do_not_cross_again(pair):
    source, destination = pair
    teach(destination, SYSTEM[:128] + b"x")
    teach(source, SYSTEM + b"x")
    first = destination.ask(prompt_of(b"first"), prefix_url="http://127.0.0.1:1")
    destination.run_with(lambda: bool(destination.ends(first)))
    manifest = destination.fetches[0]._state.ledger.expected
    assert (manifest.start_token, manifest.end_token) == (128, 192)
    assert destination.engine.stats.prefix_tokens == 64


def test_nothing_longer_is_a_404_and_holds_nothing(pair):
    source, _ = pair
    teach(source, SYSTEM + b"x")
    answers = [source.ask_prefix(SYSTEM + b"y", 192), source.ask_prefix(b"z" * 100), source.ask_prefix(b"z")]
    assert [(answer.status, answer.code) for answer in answers] == [(404, "prefix_not_found")] * 3
    assert isinstance(source.ask_prefix(SYSTEM + b"y", 191), Granted)
    source.offers.cancel(next(iter(source.offers._offers.values())).manifest.transfer_id)
    source.step()


def test_a_prefix_is_less_than_the_prompt(pair):
    source, _ = pair
    teach(source, SYSTEM + b"x")
    assert isinstance(source.ask_prefix(SYSTEM), Failed), "the state stands where the prompt ends: a token must be left"


def test_a_prefix_takes_no_promised_slot(models):
    source = Source(models[0], max_running=2)
    teach(source, SYSTEM + b"x")
    handle = source.ask(b"some prompt", choices=3, max_tokens=3)
    source.engine._handle_events(wait=False)
    source.engine._admit(next(source.engine.requests.sequences()))  # one slot is free, for its next choice
    answer = source.ask_prefix(SYSTEM + b"y")
    assert isinstance(answer, Failed)
    assert (answer.status, answer.code) == (503, "overloaded")
    source.run()
    assert len(source.tokens(handle, 2)) == 3
    source.assert_nothing_is_held()


def test_a_prefix_takes_no_page_that_a_stream_needs_next(models):
    source = Source(models[0], num_pages=5)
    teach(source, b"x" * 65)  # a block, and a state
    source.ask(b"y" * 60, max_tokens=30, ignore_eos=True)
    for _ in range(3):
        source.step()
    free = source.engine.cache.free_pages
    taken = source.engine.cache.open((), 64 * (free - 1), 0)
    assert taken is not None
    answer = source.ask_prefix(b"x" * 65)
    source.engine.cache.close(taken.lease)
    assert isinstance(answer, Failed)
    assert answer.status in (404, 503)
    source.run()
    source.assert_nothing_is_held()


def test_what_is_computed_on_lossy_rows_stays_out_of_the_destinations_cache_too(pair, monkeypatch: pytest.MonkeyPatch):
    source, destination = pair
    teach(destination, SYSTEM + b"x")
    cached = destination.engine.cache.stats().cached_pages
    real = RemoteCaches.start_fetch

    def begin(remote: RemoteCaches, sequence: Sequence) -> None:
        assert sequence.is_exact
        real(remote, sequence)
        sequence.is_exact = False

    monkeypatch.setattr(RemoteCaches, "start_fetch", begin)
    handle = destination.ask(prompt_of(b"first"), prefill_url="http://127.0.0.1:1", max_tokens=80, ignore_eos=True)
    destination.run_with(lambda: bool(destination.ends(handle)))
    assert source.engine.cache.stats().cached_pages == 0
    assert destination.engine.cache.stats().cached_pages == cached, "P reported so"


def test_a_prefill_that_is_on_its_way_keeps_its_pages_when_streams_want_them(models, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(schedule.BUDGETS, "mixed", schedule.Budgets(64, 2))
    source = Source(models[0], num_pages=6)
    stream = source.ask(b"def f(", max_tokens=150, ignore_eos=True)
    while len(source.tokens(stream)) < 50:
        source.step()
    source.grant_prefill(list(b"x" * 200), 0)  # all pages but the next one of the stream
    while list(source.engine.requests.sequences())[-1].phase is not Phase.DELIVERING:
        source.step()
    assert source.engine.stats.preemptions == 0
    assert len(source.tokens(stream)) < 150, "the stream waits for a page"
    source.offers.cancel(next(iter(source.offers._offers.values())).manifest.transfer_id)
    source.run()
    assert len(source.tokens(stream)) == 150
    source.assert_nothing_is_held()
