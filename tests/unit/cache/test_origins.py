"""What came from another cluster serves only requests that allow its bytes, and so does what was computed from it."""

from prfaas_worker.cache.cache import AllowedPlaces

from .conftest import PAGE_TOKENS, Rig

A = list(range(100, 121))  # five blocks of four tokens, and one token


def receive(rig: Rig, tokens: list[int], *clusters: str) -> None:
    """Serve a prompt whose cache comes from other clusters."""
    chain = rig.chain(tokens)
    opened = rig.cache.open(chain.hashes, len(tokens), len(tokens) - 1)
    assert opened is not None
    rig.compute(opened.lease.slot, tokens, opened.cached_tokens, len(tokens) - 1)
    rig.cache.receive(opened.lease, clusters)
    blocks = (len(tokens) - 1) // PAGE_TOKENS
    rig.cache.publish(opened.lease, chain, blocks)
    rig.cache.checkpoint(opened.lease, chain, blocks)
    rig.cache.close(opened.lease)
    rig.cache.check_integrity()


def cached(rig: Rig, tokens: list[int], places: AllowedPlaces) -> int:
    return rig.cache.cached_tokens(rig.chain(tokens).hashes, len(tokens) - 1, places)


def test_bytes_of_a_cluster_serve_only_requests_that_allow_it(rig: Rig):
    receive(rig, A, "eu", "us")
    assert [cached(rig, A, places) for places in (None, ("us", "eu"), ("eu",), ())] == [20, 20, 0, 0]


def test_what_was_made_here_serves_all(rig: Rig):
    rig.serve(A)
    assert [cached(rig, A, places) for places in (None, ("eu",), ())] == [20, 20, 20]


def test_what_is_computed_from_it_stands_on_the_same_clusters(rig: Rig):
    receive(rig, A, "eu")
    longer = [*A[:20], *range(12)]
    assert rig.serve(longer) == 20
    assert [cached(rig, longer, places) for places in (("eu",), ())] == [28, 0]


def test_a_choice_of_it_does_too(rig: Rig):
    chain = rig.chain(A)
    first = rig.cache.open(chain.hashes, 21, 20).lease
    rig.cache.receive(first, ["eu"])
    copy = rig.cache.fork(first, 18)
    rig.cache.publish(copy, chain, 5)
    for lease in (first, copy):
        rig.cache.close(lease)
    assert rig.cache.open(chain.hashes, 21, 20, places=()).attention_tokens == 0


def compute(rig: Rig, tokens: list[int], places: AllowedPlaces) -> None:
    chain = rig.chain(tokens)
    opened = rig.cache.open(chain.hashes, len(tokens), len(tokens) - 1, places=places)
    assert opened is not None
    rig.compute(opened.lease.slot, tokens, opened.cached_tokens, len(tokens) - 1)
    rig.cache.publish(opened.lease, chain, 5)
    rig.cache.checkpoint(opened.lease, chain, 5)
    rig.cache.close(opened.lease)
    rig.cache.check_integrity()


def test_what_a_request_computes_anew_takes_its_place_for_all(rig: Rig):
    receive(rig, A, "eu")
    compute(rig, A, ())
    assert [cached(rig, A, places) for places in (None, ())] == [20, 20]


def test_what_comes_later_never_replaces_what_was_made_here(rig: Rig):
    compute(rig, A, ())
    chain = rig.chain(A)
    lease = rig.cache.open(chain.hashes, 21, 0).lease
    rig.cache.receive(lease, ["eu"])
    rig.cache.publish(lease, chain, 5)
    rig.cache.checkpoint(lease, chain, 5)
    rig.cache.close(lease)
    rig.cache.check_integrity()
    assert cached(rig, A, ()) == 20


def test_pages_that_were_evicted_or_reset_forget_their_clusters(rig: Rig):
    for forget in (rig.fill, rig.cache.reset):
        receive(rig, A, "eu")
        forget()
        rig.cache.check_integrity()
        rig.serve(A)
        assert cached(rig, A, ()) == 20
        rig.cache.reset()
