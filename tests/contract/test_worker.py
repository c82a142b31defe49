"""Our worker keeps the contract of engines, alone and in pairs, whatever breaks; and what it promises beside it."""

import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest

from prfaas.cli.contract.calls import CheckedAnswer
from prfaas.cli.contract.checks import ALONE, PAIR, hands_off, text_of
from prfaas.wire import headers

from ..unit.worker.conftest import launched
from ..waiting import assert_prompt, eventually
from .bench import Bench
from .conftest import benches, ready
from .failures import FAILURES, LENGTH, a_source_that_falls_silent_is_given_up

pytestmark = pytest.mark.system


@pytest.mark.parametrize("claim", ALONE)
def test_a_worker_keeps_what_is_asked_of_an_engine(bench: Bench, claim: str):
    assert ALONE[claim](bench.destination.engine)


@pytest.mark.parametrize("claim", PAIR)
def test_two_workers_keep_what_is_asked_of_a_pair(bench: Bench, claim: str):
    assert PAIR[claim](bench.pair())


@pytest.mark.parametrize("failure", FAILURES, ids=lambda one: one.__name__)
def test_workers_survive(bench: Bench, failure):
    failure(bench)


@pytest.mark.parametrize("length", [1, 63, 64, 65, 513])
def test_a_prompt_of_any_length_is_handed_off_and_no_part_of_it_computed_twice(bench: Bench, length: int):
    computed, prompt, pair = "prfaas_prompt_tokens_total", text_of(length), bench.pair()
    before = pair.destination.metrics()[computed]
    answered = pair.hand_off(prompt)[1].answer()
    assert pair.destination.metrics()[computed] == before
    assert int(answered.headers[headers.KV_BYTES]) > 64 * length
    assert pair.require_same(answered, prompt)


@pytest.mark.quiet
def test_a_silent_link_is_noticed_within_seconds(bench: Bench):
    began = time.monotonic()
    bench.destination.engine.ask(prompt=text_of(LENGTH), max_tokens=1)
    alone_seconds, began = time.monotonic() - began, time.monotonic()
    a_source_that_falls_silent_is_given_up(bench)
    seconds = time.monotonic() - began - 2 * alone_seconds
    assert "sent no answer for " in bench.destination.log.read_text()
    assert_prompt(seconds, 4.5, "a second of silence, another until a new connection proves it, and the answers")


def test_a_model_with_other_layers_is_handed_off(tmp_path: Path):
    flags = "--model-source", "builtin:qwen3-next-tiny", "--profile-seconds", "0", "--max-context", "2048"
    with benches(tmp_path, *flags) as bench:
        for length in (1, 64, 150):
            assert hands_off(length, bench.pair())


def texts(answer: CheckedAnswer) -> list[str]:
    assert answer.status == 200, answer.body
    return [choice["text"] for choice in answer.body["choices"]]


def test_a_seed_gives_the_same_choices_wherever_the_prompt_was_prefilled(bench: Bench):
    prompt, drawn = text_of(300), {"temperature": 1.0, "seed": 11, "n": 3, "max_tokens": 20}
    answered = bench.pair().hand_off(prompt, **drawn)[1].answer()
    wanted = texts(bench.destination.engine.ask(prompt=prompt, cache_salt="alone", **drawn))
    assert texts(answered) == wanted
    assert len(set(wanted)) == 3
    assert answered.has_fetched


def test_a_sampled_stream_continues_behind_a_hand_off(bench: Bench):
    prompt, stream, engine = text_of(300), {"seed": 5, "created": 1_795_425_279}, bench.destination.engine
    ask: dict[str, Any] = {"max_tokens": 20, "temperature": 1.0, "stream": True, "return_token_ids": True}
    whole = engine.ask(prompt=prompt, cache_salt="alone", prfaas_stream=stream, **ask)
    with urllib.request.urlopen(f"{engine.url}/v1/profile") as answer:
        model = msgspec.json.decode(answer.read())["fingerprint"]
    ids = whole.ids[1]
    more = {"prfaas_stream": stream | {"model": model, "drawn": {0: ids[:7]}}, "logprobs": None}
    rest = bench.pair().hand_off(prompt, **ask, **more)[1].answer()
    assert (ids[:7] + rest.ids[1], rest.has_fetched) == (ids, True)
    assert whole.choice["text"].endswith(rest.choice["text"])


def test_the_first_cache_byte_leaves_long_before_the_prefill_ends(bench: Bench):
    answered = bench.pair().hand_off(text_of(16_000), max_tokens=1)[1].answer()
    first, all_of_it = (float(answered.headers[f"x-prfaas-{name}-seconds"]) for name in ("first-byte", "prefill"))
    assert 0 < first < all_of_it


def test_both_sides_count_a_transfers_bytes(bench: Bench):
    pair, sent = bench.pair(), ("prfaas_transfer_sent_bytes_total", "prfaas_link_sent_bytes_total")
    pair.wait_idle()  # else the end of an earlier transfer counts here
    places = [(pair.source, name) for name in sent] + [(pair.destination, "prfaas_transfer_received_bytes_total")]
    before = [engine.metrics().get(name, 0) for engine, name in places]
    kv_bytes = int(pair.hand_off(text_of(1000))[1].answer().headers[headers.KV_BYTES])
    pair.wait_idle()
    for (engine, name), former in zip(places, before, strict=True):
        assert kv_bytes <= engine.metrics()[name] - former < 1.05 * kv_bytes + 5000, name


def test_twenty_requests_at_once_get_the_answers_they_get_alone(bench: Bench):
    prompts, pair = [text_of(20 + 60 * number) for number in range(10)], bench.pair()
    alone = [texts(pair.destination.ask(prompt=prompt, cache_salt="alone")) for prompt in prompts]

    def together(number: int) -> list[str]:
        fields = {"cache_salt": f"{number}", "max_tokens": 8}
        if number < 10:
            return texts(pair.destination.ask(prompt=prompts[number], **fields))
        return texts(pair.hand_off(prompts[number - 10], **fields)[1].answer())

    with ThreadPoolExecutor(20) as pool:
        assert list(pool.map(together, range(20))) == 2 * alone
    pair.wait_idle()


def test_what_names_no_transfer_is_refused_by_its_field(bench: Bench):
    pair, named = bench.pair(), bench.pair().name_transfer()
    assert pair.begin_source(named, "x" * 300).answer().status == 200
    again = pair.begin_source(named, "x" * 300).answer()
    assert (again.status, again.body["error"]["code"]) == (409, "transfer_open")
    wrong: list[dict[str, Any]] = [{"role": "thief"}, {"transfer_id": "x"}, {"epoch": -1}, {"port": 70_000}]
    legs = [{"prompt": "a"} | {"leg": one} for one in (*wrong, {"token": "a b"})] + [{"prompt": ["a", "b"], "leg": {}}]
    for prompt, leg in (one.values() for one in legs):
        params = {"prfaas": msgspec.to_builtins(named) | leg}
        answer = pair.destination.ask(prompt=prompt, kv_transfer_params=params)
        assert (answer.status, answer.body["error"]["param"]) == (400, "kv_transfer_params"), leg
    assert pair.begin_destination(named, "x" * 300).answer().has_fetched, "and the first one is given"


def test_a_source_that_is_full_refuses_at_its_leg(bench: Bench, tmp_path: Path):
    with launched(tmp_path) as launch:
        (full,) = ready(launch("full", "--max-running", "1"))
        pair = bench.pair(source=full)
        legs = [pair.begin_source(pair.name_transfer(), text_of(300)) for _ in range(20)]
        ended = lambda: [leg.answer() for leg in legs if leg.is_answered()]  # noqa: E731
        eventually(lambda: any(one.status != 200 for one in ended()), "one is refused")
        refused = next(one for one in ended() if one.status != 200)
        assert (refused.status, refused.body["error"]["code"]) == (503, "overloaded")
        for leg in legs:
            leg.leave()
