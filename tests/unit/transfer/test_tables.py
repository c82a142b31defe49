"""What an engine remembers of its transfers: memory that was given back is never copied, and all of it comes back."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from prfaas.errors import PeerError
from prfaas_transfer.mover.tables import Fetches, FetchNews, InVain, Sources

from ...waiting import PATIENCE_SECONDS

WHOLE = ("t",)
HALVES = ("t/0", "t/1")
NOTHING = FetchNews(set(), set(), set())


@pytest.fixture
def sources() -> Sources[str]:
    return Sources()


@pytest.fixture
def fetches() -> Fetches[str]:
    return Fetches()


def refusal(call: Callable[[], object]) -> str:
    with pytest.raises(PeerError) as caught:
        call()
    return str(caught.value)


def copy(table: Sources[str] | Fetches[str], key: str) -> str:
    with table.copying(key) as cache:
        return cache


@pytest.mark.parametrize("ends_first", ["request", "offers"])
def test_a_source_is_sent_once_its_request_and_all_its_offers_are_over_and_is_named_once(sources, ends_first):
    sources.add("t", "r", HALVES, "cache")
    sources.add("other", "other", ["other"], "its cache")
    if ends_first == "request":
        assert sources.take_sent({"r", "unknown"}) == set()
    for key in HALVES:
        assert sources.take_sent() == set()
        sources.end(key)
    if ends_first == "offers":
        assert sources.take_sent() == set()
        assert sources.take_sent({"r"}) == {"r"}
    else:
        assert sources.take_sent() == {"r"}
    assert sources.take_sent({"r"}) == set()
    assert len(sources) == 1, "the other one is open"


def test_a_source_of_which_nothing_is_offered_is_sent_as_soon_as_its_request_is_over(sources):
    sources.add("t", "r", (), "cache")
    assert sources.take_sent() == set()
    assert sources.take_sent({"r"}) == {"r"}
    assert len(sources) == 0


def test_a_revoked_source_gives_nothing_more_and_is_revoked_once(sources):
    sources.add("t", "r", WHOLE, "cache")
    assert sources.cache_of("r") == copy(sources, "t") == "cache"
    assert sources.revoke("unknown") is None
    assert sources.revoke("r") == "cache"
    assert sources.revoke("r") is None
    assert sources.cache_of("r") is None
    assert refusal(lambda: copy(sources, "t")) == "the request has lost its memory"
    sources.end("t")
    assert sources.take_sent({"r"}) == {"r"}, "it is freed as any other"


@pytest.mark.parametrize("kind", [Sources, Fetches])
def test_nothing_is_copied_of_what_is_over_or_was_never_there(kind):
    table = kind()
    table.add("t", "r", HALVES, "cache")
    assert copy(table, "t/1") == "cache"
    table.end("t/1") if kind is Sources else table.end("t/1", "")
    for key in ("t/1", "t", "unknown"):
        assert refusal(lambda key=key: copy(table, key)) == "the transfer is over"
    assert copy(table, "t/0") == "cache", "the other half is not"


def test_memory_that_is_read_or_written_when_the_last_end_comes_is_free_after_that_copy(sources, fetches):
    """A mover that died ends its transfers, and a copy that it asked for may still run."""
    sources.add("t", "s", WHOLE, "cache")
    fetches.add("t", "d", WHOLE, "cache")
    with sources.copying("t"), fetches.copying("t"):
        sources.end("t")
        fetches.end("t", "the mover ended")
        assert sources.take_sent({"s"}) == set()
        assert fetches.take() == FetchNews(set(), set(), {"d"})
    assert sources.take_sent() == {"s"}
    assert fetches.take() == FetchNews({"d"}, {"d"}, set())


@pytest.mark.system
def test_only_a_request_that_is_revoked_waits_and_for_its_own_copies_alone(sources):
    for name in ("t", "other"):
        sources.add(name, name, [name], "cache")
    runs, may_end = threading.Event(), threading.Event()

    def read() -> None:
        with sources.copying("t"):
            runs.set()
            assert may_end.wait(PATIENCE_SECONDS)

    with ThreadPoolExecutor(2) as pool:
        reading = pool.submit(read)
        assert runs.wait(PATIENCE_SECONDS)
        assert sources.revoke("other") == "cache"
        sources.add("third", "third", ["third"], "cache")
        assert sources.take_sent({"third"}) == set()
        revoking = pool.submit(sources.revoke, "t")
        with pytest.raises(TimeoutError):
            revoking.result(0.2)
        may_end.set()
        assert revoking.result(PATIENCE_SECONDS) == "cache"
        reading.result(PATIENCE_SECONDS)


def test_a_copy_that_fails_holds_up_nobody(sources):
    sources.add("t", "r", WHOLE, "cache")
    with pytest.raises(ValueError, match="wrong"), sources.copying("t"):
        raise ValueError("wrong")
    assert sources.revoke("r") == "cache"


@pytest.mark.parametrize(
    ("reasons", "failed", "in_vain"),
    [
        (("", ""), set(), [None, None]),
        (("lost", ""), {"r"}, [InVain("r", frozenset({"t/1"})), None]),
        (("", "lost"), {"r"}, [None, InVain("r", frozenset())]),
        (("lost", "cancelled"), {"r"}, [InVain("r", frozenset({"t/1"})), None]),
    ],
)
def test_a_fetch_in_slices_has_come_when_all_of_them_have_ended_and_fails_with_the_first(
    fetches, reasons, failed, in_vain
):
    fetches.add("t", "r", HALVES, "cache")
    fetches.add("other", "other", ["other"], "cache")
    assert fetches.take() == NOTHING
    assert fetches.end("t/0", reasons[0]) == in_vain[0]
    assert fetches.take() == FetchNews(set(), set(), failed if reasons[0] else set())
    assert fetches.end("t/1", reasons[1]) == in_vain[1]
    assert fetches.take() == FetchNews({"r"}, failed, set() if reasons[0] else failed)
    assert fetches.take() == NOTHING
    assert len(fetches) == 1


def test_a_fetch_without_slices_has_come_at_once_or_in_vain(fetches):
    fetches.add("here", "here", (), "cache")
    fetches.add("refused", "refused", (), "cache", "the ranks do not divide")
    assert fetches.take() == FetchNews({"here", "refused"}, {"refused"}, {"refused"})
    assert len(fetches) == 0


def test_the_open_fetches_of_a_request_are_found_to_cancel_them(fetches):
    fetches.add("t", "r", HALVES, "cache")
    fetches.add("other", "other", ["other"], "cache")
    fetches.end("t/0", "")
    assert fetches.keys_of({"r", "unknown"}) == {"t/1"}
    assert fetches.keys_of(set()) == set()


@pytest.mark.parametrize("kind", [Sources, Fetches])
def test_an_engine_that_hears_of_ends_at_once_takes_out_a_cache_after_the_copy_that_runs(kind):
    table = kind()
    table.add("t", "r", WHOLE, "cache")
    table.add("other", "other", ["other"], "its cache")
    copies, may_end = threading.Event(), threading.Event()

    def copy_slowly() -> None:
        with table.copying("t"):
            copies.set()
            assert may_end.wait(PATIENCE_SECONDS)

    with ThreadPoolExecutor(2) as pool:
        copying = pool.submit(copy_slowly)
        assert copies.wait(PATIENCE_SECONDS)
        assert table.finish("other").cache == "its cache"
        finishing = pool.submit(table.finish, "t")
        assert not finishing.done()
        may_end.set()
        assert finishing.result(PATIENCE_SECONDS).cache == "cache"
        copying.result(PATIENCE_SECONDS)
    assert (len(table), "t" in table, table.finish("t")) == (0, False, None)
    assert refusal(lambda: copy(table, "t")) == "the transfer is over"
