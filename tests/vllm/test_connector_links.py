"""prfaas's connector over links that break, damage and refuse, between real vLLM engines."""

import datetime
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from prfaas import identity
from prfaas.wire.frames import DATA_KINDS

from ..unit.tls.mounts import Mount
from ..unit.worker.transfer_proxy import CutError, Proxy, Seen
from .connected import TOKENS, TRANSFERS, Pair, answer_alone, prompt_of, reference, started
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


def cut_once(after: int):
    seen: list[Seen] = []

    def change(frame: Seen) -> Sequence[bytes]:
        if frame.header.kind in DATA_KINDS:
            seen.append(frame)
            if len(seen) == after:
                raise CutError
        return [frame.raw]

    return change


def damage_once(number: int):
    seen: list[Seen] = []

    def change(frame: Seen) -> Sequence[bytes]:
        if frame.header.kind in DATA_KINDS:
            seen.append(frame)
            if len(seen) == number:
                return [frame.raw[:-1] + bytes([frame.raw[-1] ^ 1])]
        return [frame.raw]

    return change


@pytest.mark.parametrize("trouble", [cut_once(1), cut_once(5), damage_once(3)], ids=["cut at once", "cut", "damaged"])
def test_a_broken_or_damaged_connection_continues_where_it_was(reference_engine: Engine, plain: Pair, trouble):
    ids, tokens, logprobs = reference(reference_engine, plain, LENGTH)
    plain.source.forget_prefixes()
    plain.destination.forget_prefixes()
    free = plain.source.free_pages(), plain.destination.free_pages()
    with Proxy(("127.0.0.1", plain.port), down=trouble) as proxy:
        answer = plain.offload(ids, port=proxy.address[1])[1].result()
        assert proxy.connections >= 2
    assert (answer.tokens, answer.logprobs) == (tokens, logprobs)
    assert answer.cached_tokens > 0
    plain.assert_nothing_is_held(free)


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
        return "manifest field fingerprint is 'other', this instance needs" in plain.destination.log.read_text()

    for _ in range(20):
        if refused():
            return
    raise AssertionError(plain.destination.log.read_text()[-2000:])
