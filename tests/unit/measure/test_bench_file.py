"""Recorded results become a profile where requests ran one by one, and are refused with the command otherwise."""

import msgspec
import pytest

from prfaas.capacity.profile import prefill_seconds
from prfaas.errors import CapacityError, ConfigError
from prfaas.measure.answers import CacheBytes
from prfaas.measure.bench_file import measured, read_bench_file
from prfaas.wire.profile import Profile

TRUE = Profile(state_bytes=1000, token_bytes=10, fixed_seconds=0.02, token_seconds=2e-5, squared_seconds=1e-10)
CACHE = CacheBytes(1000, 10, "a test")
STEP = 0.004


def recorded(tokens, *, count=3, slow=(), **fields):
    """A result file as vLLM writes it, of prompts of one length."""
    times = [prefill_seconds(TRUE, tokens) * (slow[n] if n < len(slow) else 1.0) for n in range(count)]
    document = {
        "date": "20260501-120000",
        "model_id": "m",
        "request_rate": "inf",
        "max_concurrency": 1,
        "duration": 9.0,
        "input_lens": [tokens] * count,
        "output_lens": [17] * count,
        "ttfts": times,
        "itls": [[STEP] * 16] * count,
        "generated_texts": ["x"] * count,
        "errors": [""] * count,
    }
    return msgspec.json.encode(document | fields)


def read(*documents):
    return measured([read_bench_file(one, "r.json") for one in documents], "r.json", CACHE)


def test_files_of_several_lengths_make_the_curve_and_the_step():
    found = read(*(recorded(tokens) for tokens in (256, 1024, 4096, 16_384)))
    for tokens in (300, 2000, 10_000):
        assert prefill_seconds(found.profile, tokens) == pytest.approx(prefill_seconds(TRUE, tokens), rel=1e-3)
    assert [(step.batch, step.seconds) for step in found.decode_steps] == [(1, pytest.approx(STEP))]
    assert found.profile.samples == 12


def test_slow_requests_and_failed_ones_do_not_count():
    failed = recorded(1024, ttfts=[0.0, 0.001, 0.001], errors=["refused"] * 3)
    found = read(recorded(256, slow=(3.0,)), recorded(1024, count=4, slow=(1.5, 2.0)), recorded(8192), failed)
    assert prefill_seconds(found.profile, 2000) == pytest.approx(prefill_seconds(TRUE, 2000), rel=1e-3)


def test_lengths_of_one_file_may_be_spread():
    lengths = [round(256 * 1.01**n) for n in range(400)]
    document = recorded(
        256, count=400, input_lens=lengths, ttfts=[prefill_seconds(TRUE, n) * (1 + 0.3 * (n % 3 == 0)) for n in lengths]
    )
    found = read(document)
    assert prefill_seconds(found.profile, 5000) == pytest.approx(prefill_seconds(TRUE, 5000), rel=0.03)


@pytest.mark.parametrize(
    "fields",
    [
        {"max_concurrency": 4},
        {"max_concurrency": None},
        {"max_concurrency": None, "max_concurrent_requests": 3},
        {"max_concurrency": None, "start_times": [0.0, 0.01, 5.0]},
    ],
)
def test_requests_that_overlap_are_refused_with_the_command(fields):
    with pytest.raises(ConfigError, match=r"overlap.*vllm bench serve .*--random-input-len N.*--max-concurrency 1"):
        read(recorded(256, **fields))


@pytest.mark.parametrize(
    "fields", [{"max_concurrent_requests": 1}, {"start_times": [0.0, 2.0, 4.0]}, {"start_times": [4.0, 0.0, 2.0]}]
)
def test_requests_that_provably_did_not_overlap_are_taken(fields):
    files = [recorded(tokens, max_concurrency=None, **fields) for tokens in (256, 4096)]
    assert len(read(*files).lengths) == 2


@pytest.mark.parametrize(
    ("document", "said"),
    [
        (b"%PDF", "no result of `vllm bench serve`"),
        (b"[]", "no result"),
        (b"{}", "no result"),
        (b'{"model_id": "m"}', "saved without --save-detailed"),
        (recorded(256, ttfts=[1.0]), "different numbers of requests"),
    ],
)
def test_another_file_is_refused(document, said):
    with pytest.raises(ConfigError, match=said):
        read_bench_file(document, "r.json")


def test_files_of_two_models_are_refused():
    with pytest.raises(ConfigError, match="several models: m, n"):
        read(recorded(256), recorded(1024, model_id="n"))


def test_one_length_makes_no_curve():
    with pytest.raises(ConfigError, match=r"of 1 lengths there are two prompts or more.*record it"):
        read(recorded(256))


def test_prompts_that_came_once_are_not_believed():
    with pytest.raises(ConfigError, match="of 0 lengths"):
        read(*(recorded(tokens, count=1) for tokens in (256, 1024, 4096)))


def test_repeats_that_never_agree_are_not_believed():
    with pytest.raises(CapacityError, match="and 1 of 3 are near the median"):
        read(recorded(256), recorded(1024, slow=(1.0, 1.5, 2.5)))


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"ttfts": [1e9, 1.0, 1.0]}, "has 1e\\+09 in ttfts, which must lie between 0 and 100000"),
        ({"ttfts": [-1.0, 1.0, 1.0]}, "has -1 in ttfts"),
        ({"itls": [[-0.25], [0.1], [0.1]]}, "has -0.25 in itls"),
        ({"input_lens": [10**30, 10, 10]}, "has 1e\\+30 in input_lens"),
        ({"model_id": "a\nhub: []"}, "model_id that cannot be printed"),
    ],
)
def test_absurd_figures_of_a_file_are_refused_by_name(fields, problem):
    with pytest.raises(ConfigError, match=problem):
        read_bench_file(recorded(256, **fields), "r.json")


def test_steps_that_were_not_recorded_are_none():
    found = read(*(recorded(tokens, itls=[[]] * 3) for tokens in (256, 1024, 4096)))
    assert found.decode_steps == ()


def test_the_command_takes_another_seed_each_time_as_equal_ones_share_prefixes():
    with pytest.raises(ConfigError, match=r"another seed each time, with: .* --seed N"):
        read_bench_file(b"{}", "r.json")
