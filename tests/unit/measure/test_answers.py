"""What servers say is read exactly, and what is not understood ends in a sentence."""

import msgspec
import pytest

from prfaas.capacity.models import MODEL_CACHES
from prfaas.errors import ConfigError, ProtocolError, RequestError
from prfaas.measure.answers import (
    TokenStream,
    cache_bytes_by_name,
    cache_bytes_given,
    read_cache_bytes,
    read_card,
    read_loads,
)

URL = "http://10.0.0.5:8000"


def event(**fields):
    return b"data: " + msgspec.json.encode({"id": "cmpl-1", **fields}) + b"\n\n"


def piece(completion_tokens=None, text="x"):
    usage = None if completion_tokens is None else {"prompt_tokens": 4, "completion_tokens": completion_tokens}
    return event(choices=[{"index": 0, "text": text}], usage=usage)


def usage_event(cached_tokens=0, completion_tokens=1):
    details = {"cached_tokens": cached_tokens}
    usage = {"prompt_tokens": 4, "completion_tokens": completion_tokens, "prompt_tokens_details": details}
    return event(choices=[], usage=usage)


def read(*pieces, step=1.0):
    stream = TokenStream(URL, 10.0)
    for place, one in enumerate(pieces):
        stream.feed(one, 11.0 + step * place)
    return stream.end()


def test_a_piece_counts_as_many_tokens_as_its_usage_says():
    answer = read(piece(1), piece(3), usage_event(completion_tokens=3), b"data: [DONE]\n\n")
    assert [mark.tokens for mark in answer.marks] == [1, 3]
    assert (answer.first_seconds, answer.prompt_tokens) == (1.0, 4)


def test_without_continuous_usage_a_piece_is_a_token():
    assert [mark.tokens for mark in read(piece(), piece(), b"data: [DONE]\n").marks] == [1, 2]


def test_an_event_without_a_token_is_no_first_token():
    assert read(piece(0, ""), piece(1), b"data: [DONE]\n").first_seconds == 2.0


def test_events_may_be_cut_anywhere():
    whole = piece(1) + piece(2) + usage_event(completion_tokens=2) + b"data: [DONE]\n\n"
    for place in range(1, len(whole)):
        assert read(whole[:place], whole[place:]).marks[-1].tokens == 2


def test_cached_tokens_are_seen():
    assert read(piece(1), usage_event(cached_tokens=3), b"data: [DONE]\n").cached_tokens == 3


@pytest.mark.parametrize("pieces", [(piece(1),), (b"data: [DONE]\n",), (b"",)])
def test_an_answer_that_ends_early_is_none(pieces):
    with pytest.raises(ProtocolError, match="ended before its last token"):
        read(*pieces)


def test_an_error_within_a_stream_is_told():
    with pytest.raises(RequestError, match="out of memory"):
        read(event(error={"message": "out of memory"}))


def test_other_bytes_are_no_stream():
    with pytest.raises(ProtocolError, match=r"streams something else.*give the URL of a vLLM"):
        read(b"data: <html>\n")


def test_the_first_model_is_read_with_its_context():
    cards = [{"id": "a", "object": "model", "max_model_len": 4096, "owned_by": "vllm", "root": "/m"}, {"id": "lora"}]
    card = read_card(msgspec.json.encode({"object": "list", "data": cards}), URL)
    assert (card.id, card.max_model_len, card.owned_by, card.root) == ("a", 4096, "vllm", "/m")


@pytest.mark.parametrize("document", [b"<html>", b"{}", b'{"data": []}', b"[]"])
def test_what_lists_no_models_is_refused_with_what_to_give(document):
    with pytest.raises(ProtocolError, match="give the URL of a vLLM, an SGLang or a prfaas worker"):
        read_card(document, URL)


def test_requests_that_run_or_wait_are_summed_over_engines():
    metrics = (
        "# HELP vllm:num_requests_running Requests.\n"
        'vllm:num_requests_running{engine="0",model_name="a{b}"} 2.0\n'
        'vllm:num_requests_running{engine="1",model_name="a"} 1.0\n'
        'vllm:num_requests_waiting{engine="0",model_name="a"} 4.0\n'
        'vllm:num_requests_waiting_by_reason{engine="0"} 9.0\n'
    )
    assert read_loads(metrics) == 7
    assert read_loads("prfaas_requests_running 0.0\n") == 0
    assert read_loads("go_goroutines 7\n") is None


def test_cache_sizes_of_all_ranks_make_one_line():
    metrics = "".join(
        f'prfaas_profile_cache_bytes{{rank="{rank}",tokens="{tokens}"}} {1000 + 10 * tokens}.0\n'
        for rank in (0, 1)
        for tokens in (256, 1024)
    )
    cache = read_cache_bytes(metrics, URL)
    assert cache is not None
    assert (cache.state_bytes, cache.token_bytes) == (1000, 10)
    assert read_cache_bytes('prfaas_profile_cache_bytes{tokens="256"} 1\n', URL) is None


@pytest.mark.parametrize("name", ["Kimi-K3-Mini-4B", "qwen3.5-27b-draft-0.5b", "my-kimi-k3", "/kimi-k3/tokenizer"])
def test_the_name_of_another_model_that_holds_a_known_one_is_not_it(name):
    assert cache_bytes_by_name(name) is None


@pytest.mark.parametrize("value", ["NaN", "+Inf", "-5"])
def test_absurd_metrics_give_no_size_and_no_load(value):
    text = f'prfaas_profile_cache_bytes{{tokens="1"}} 10\nprfaas_profile_cache_bytes{{tokens="2"}} {value}\n'
    found = read_cache_bytes(text, "here")
    assert found is None or found.token_bytes == 0
    assert read_loads(f"vllm:num_requests_running {value}") in {None, -5}


def test_usage_that_no_answer_has_is_refused_and_no_error_is_none():
    stream = TokenStream("http://here", 0.0)
    stream.feed(b'data: {"choices": [{}], "error": null}\n', 1.0)
    with pytest.raises(ProtocolError, match="streams something else"):
        stream.feed(b'data: {"usage": {"completion_tokens": ' + b"9" * 400 + b"}}\n", 1.0)


def test_a_line_without_an_end_is_given_up():
    stream = TokenStream("http://here", 0.0)
    stream.feed(b"x" * (1 << 20), 1.0)
    with pytest.raises(ProtocolError, match="a line without an end"):
        stream.feed(b"x", 1.0)


def test_a_known_model_is_found_in_a_name():
    cache = cache_bytes_by_name("prod", "/models/Qwen3.5-397B-A17B-FP8")
    assert cache is not None
    assert cache.token_bytes == MODEL_CACHES["qwen3.5-397b"].token_bytes
    assert cache_bytes_by_name("Qwen/Qwen3.5-35B-A3B-FP8") == (64_389_120, 20_480, "model qwen3.5-35b")
    assert cache_bytes_by_name("llama-3-8b", None) is None


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ((None, 5, None), "--state-bytes needs --token-bytes"),
        (("kimi-k3", None, 5), "leave --token-bytes and --state-bytes out"),
        (("kimi", None, None), "--model is 'kimi'; there are: kimi-k3"),
    ],
)
def test_sizes_that_contradict_are_refused(given, said):
    with pytest.raises(ConfigError, match=said):
        cache_bytes_given(*given)


def test_sizes_that_are_given_count():
    assert cache_bytes_given(None, None, 7)[:2] == (0, 7)
    assert cache_bytes_given("kimi-k3", None, None)[:2] == (449_372_160, 27_648)
    assert cache_bytes_given(None, None, None) is None
