"""prfaas's connector over links that break, damage and refuse, between real vLLM engines."""

import datetime
from collections.abc import Iterator
from pathlib import Path

import pytest

from prfaas import identity
from prfaas_vllm.scheduling import goal_of

from ..unit.tls.mounts import Mount
from .connected import TOKENS, TRANSFERS, Pair, answer_alone, first_of_free_ports, prompt_of, reference, start, started
from .engines import Engine, EngineHost

YEAR = identity.valid_for(datetime.datetime.now(datetime.UTC), 365)
AUTHORITY = identity.make_authority("first", YEAR)
LENGTH = 1500


def mounted(folder: Path, cluster: str) -> dict[str, str]:
    mount = Mount(folder / cluster).put(identity.issue(AUTHORITY, cluster, YEAR), AUTHORITY)
    return {"tls_dir": str(mount.path), "cluster": cluster}


@pytest.fixture(scope="module")
def secured(engine_host: EngineHost, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("tls")
    with started(engine_host, folder, mounted(folder, "eu"), mounted(folder, "hub")) as found:
        yield found


@pytest.fixture(scope="module")
def plain(engine_host: EngineHost, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with started(engine_host, tmp_path_factory.mktemp("plain")) as found:
        yield found


def test_caches_cross_inside_mutual_tls_and_only_from_the_cluster_that_was_named(
    reference_engine: Engine, secured: Pair
):
    ids, tokens, logprobs = reference(reference_engine, secured, LENGTH)
    answer = secured.offload(ids, cluster="eu")[1].result()
    assert (answer.tokens, answer.logprobs) == (tokens, logprobs)
    assert answer.cached_tokens > 0
    wanted = answer_alone(reference_engine, ids)
    for cluster in ("us", "hub"):
        secured.destination.forget_prefixes()
        answer = secured.offload(ids, cluster=cluster)[1].result()
        assert (answer.tokens, answer.cached_tokens) == (wanted.tokens, 0)
    assert "the peer is of cluster 'eu' and 'us' was expected" in secured.destination.log.read_text()


def test_a_destination_without_a_certificate_gets_nothing_and_learns_what_to_do(
    reference_engine: Engine, secured: Pair, plain: Pair
):
    ids = prompt_of(LENGTH, 7)
    wanted = answer_alone(reference_engine, ids)
    source, destination = secured.legs()
    secured.source.submit(ids, 1, source)
    answer = plain.destination.generate(ids, TOKENS, destination)
    assert (answer.tokens, answer.cached_tokens) == (wanted.tokens, 0)
    assert "give --tls-dir to both instances, or to none" in plain.destination.log.read_text()


SAME_BYTES = {
    "max_model_len": 2048,
    "enable_prefix_caching": False,
    "max_num_seqs": 4,
    "kv_cache_memory_bytes": 48 << 20,
    "kv_cache_dtype": "bfloat16",
}
OTHER_PAGES = {"block_size": 512}


@pytest.fixture(scope="module")
def unlike(engine_host: EngineHost) -> Iterator[tuple[Engine, int, Engine]]:
    """An engine whose flags change no byte of a cache, with its port, and one whose pages are others."""
    ports = [first_of_free_ports(1) for _ in range(2)]
    engines = [
        start(engine_host, f"unlike-{port}", port, options=options)
        for port, options in zip(ports, (SAME_BYTES, OTHER_PAGES), strict=True)
    ]
    yield engines[0].wait_ready(), ports[0], engines[1].wait_ready()
    for engine in engines:
        engine.stop()


@pytest.mark.parametrize("length", [300, LENGTH])
def test_max_model_len_memory_and_a_prefix_cache_of_one_side_refuse_nothing_and_change_no_bit(
    reference_engine: Engine, plain: Pair, unlike: tuple[Engine, int, Engine], length: int
):
    ids, tokens, logprobs = reference(reference_engine, plain, length)
    engine, port, _ = unlike
    for pair in (plain._replace(destination=engine), plain._replace(source=engine, port=port)):
        for one in (plain.source, plain.destination):
            one.forget_prefixes()
        answer = pair.offload(ids)[1].result()
        assert (answer.tokens, answer.logprobs) == (tokens, logprobs)
        assert answer.cached_tokens == goal_of(length, plain.destination.page_tokens)


def test_other_pages_are_refused_with_both_sides_values(
    reference_engine: Engine, plain: Pair, unlike: tuple[Engine, int, Engine]
):
    """The control of the test above."""
    destination, ids = unlike[2], prompt_of(LENGTH, 9)
    wanted = answer_alone(reference_engine, ids)
    plain.source.forget_prefixes()
    answer = plain._replace(destination=destination).offload(ids)[1].result()
    assert (answer.tokens, answer.cached_tokens) == (wanted.tokens, 0)
    assert f"row_tokens is {plain.source.page_tokens}, this instance needs 512: " in destination.log.read_text()


def test_models_that_differ_refuse_each_other_by_name(engine_host: EngineHost, reference_engine: Engine, plain: Pair):
    ids = prompt_of(LENGTH, 8)
    wanted = answer_alone(reference_engine, ids)
    plain.destination.forget_prefixes()
    mover = f"{TRANSFERS}.mover"
    plain.source.evaluate(
        f"setattr({mover}, '_options', __import__('msgspec').structs.replace({mover}._options, fingerprint='other'))"
    )
    plain.source.evaluate(f"{mover}._process.kill()")

    def refused() -> bool:
        answer = plain.offload(ids)[1].result()
        assert (answer.tokens, answer.cached_tokens) == (wanted.tokens, 0)
        plain.destination.forget_prefixes()
        reason = "manifest field fingerprint is 'other', this instance needs 'dtype bfloat16, cache bfloat16, "
        return reason in plain.destination.log.read_text()

    for _ in range(20):
        if refused():
            return
    raise AssertionError(plain.destination.log.read_text()[-2000:])
