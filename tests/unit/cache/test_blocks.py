"""What the prefix cache finds, keeps and gives up, shown with the prompts of users."""

from collections.abc import Sequence

from prfaas_worker.cache.blocks import Blocks, Evicted, Lease, checkpoint_blocks


def take(blocks: Blocks, count: int) -> list[int] | None:
    """Pages of a sequence that nothing is known of, None when there are too few."""
    lease = blocks.open((), count)
    return None if lease is None else lease.pages


PAGES_PER_STATE = 4
TOKENS = 64


class Served:
    """A pool and what it gave up, fed with whole prompts. A prompt is a string, a letter a block."""

    def __init__(self, pages: int = 1000):
        self.removed: list[Evicted] = []
        self.blocks = Blocks(pages, PAGES_PER_STATE, self.removed.extend)

    def match(self, prompt: str) -> tuple[int, int]:
        found = self.blocks.match(chain_of(prompt), len(prompt))
        return len(found.pages), found.state_blocks

    def begin(self, prompt: str) -> tuple[Lease, tuple[int, ...]]:
        chain = chain_of(prompt)
        match = self.blocks.match(chain, len(chain))
        start = chain[match.state_blocks - 1] if match.state_blocks else None
        lease = self.blocks.open(match.pages[: match.state_blocks], len(chain) + 1, start)
        assert lease is not None
        attention = len(match.pages)
        lease.branch_blocks = attention if attention > match.state_blocks else 0
        return lease, checkpoint_blocks(attention, match.state_blocks, len(chain), TOKENS, PAGES_PER_STATE)

    def serve(self, prompt: str, places: Sequence[int] | None = None) -> None:
        """Compute a prompt, keep its states at these places or where the policy says, and close it."""
        lease, wanted = self.begin(prompt)
        for place in wanted if places is None else places:
            self.blocks.publish(lease, chain_of(prompt), place)
            self.blocks.checkpoint(lease, chain_of(prompt), place)
        self.blocks.publish(lease, chain_of(prompt), len(prompt))
        self.blocks.close(lease)
        self.blocks.check_integrity()

    def list_removed(self) -> list[tuple[str, str]]:
        return [("state" if one.is_state else "block", one.key) for one in self.removed]


def chain_of(prompt: str) -> list[str]:
    return [prompt[: i + 1] for i in range(len(prompt))]


def test_a_branch_gets_its_checkpoint_on_second_sight():
    served = Served()
    served.serve("abcdef")
    served.serve("abcdXY")
    assert served.match("abcdZZ") == (4, 4)
    assert served.match("abcdXYZ") == (6, 6)


def test_the_least_recently_used_prompt_goes_first_and_its_tail_before_its_head():
    served = Served(pages=20)
    served.serve("abc", [])
    served.serve("xyz", [])
    served.serve("abc", [])
    assert take(served.blocks, 16) is not None
    assert served.list_removed() == [("block", "xyz"), ("block", "xy")]


def test_a_checkpoint_goes_with_the_block_that_it_stands_on():
    served = Served(pages=20)
    served.serve("abc", [2])
    served.serve("xyz", [])
    served.blocks._order.move_to_end(served.blocks.state_pages("ab")[0])  # as if it were the freshest of all
    free = 20 - 3 - PAGES_PER_STATE - 3
    assert take(served.blocks, free + 2) is not None
    assert served.list_removed() == [("block", "abc"), ("block", "ab"), ("state", "ab")]
    assert served.match("abc") == (1, 0)


def test_a_state_that_its_own_conversation_went_past_goes_first():
    served = Served(pages=40)
    served.serve("ab")
    served.serve("xy")
    served.serve("abcd")  # starts from ab, keeps abcd
    take(served.blocks, served.blocks.free_pages - served.blocks.cached_pages + 1)
    assert served.list_removed() == [("state", "ab")]
    assert served.match("abcd") == (4, 4)


def test_a_state_that_two_conversations_started_from_is_not_outlived():
    served = Served(pages=60)
    served.serve("ab")
    served.serve("abcd")
    served.serve("abXY")
    served.serve("pq")
    take(served.blocks, served.blocks.free_pages - served.blocks.cached_pages + 1)
    assert ("state", "ab") not in served.list_removed()
    assert served.match("abZZ") == (2, 2)


def test_a_branch_is_not_outlived_by_the_first_that_starts_there():
    served = Served(pages=80)
    served.serve("sysab")
    served.serve("sysXY")
    served.serve("sysPQ")
    take(served.blocks, served.blocks.free_pages - served.blocks.cached_pages + 1)
    assert served.match("sysZ") == (3, 3)


def test_a_rolling_checkpoint_takes_the_place_of_the_last():
    served = Served()
    lease, _ = served.begin("abcdef")
    chain = chain_of("abcdef")
    served.blocks.publish(lease, chain, 6)
    for place in (3, 4, 5):
        assert served.blocks.checkpoint(lease, chain, place, rolling=True) is not None
    assert served.match("abcdef") == (6, 5)
    assert served.blocks.cached_pages == PAGES_PER_STATE


def test_a_rolling_checkpoint_stays_when_a_sequence_started_from_it():
    served = Served()
    lease, _ = served.begin("abcdef")
    chain = chain_of("abcdef")
    served.blocks.publish(lease, chain, 6)
    served.blocks.checkpoint(lease, chain, 3, rolling=True)
    other, _ = served.begin("abcX")
    served.blocks.checkpoint(lease, chain, 5, rolling=True)
    assert served.match("abcX") == (3, 3)
    served.blocks.close(other)


def test_a_sequence_may_use_up_the_pages_of_the_state_that_it_started_from():
    served = Served(pages=12)
    served.serve("abcd")
    assert served.match("abcdefghijk") == (4, 4)
    lease, _ = served.begin("abcdefghijk")
    assert len(lease.pages) == 12
    assert not served.blocks.has_state("abcd")
    served.blocks.check_integrity()


def test_an_equal_block_of_another_sequence_keeps_its_page_private_until_the_first_is_free():
    served = Served()
    one, _ = served.begin("ab")
    two, _ = served.begin("ab")
    three, _ = served.begin("ab")
    assert served.blocks.publish(one, chain_of("ab"), 2) == [0, 1]
    assert served.blocks.publish(two, chain_of("ab"), 2) == []
    assert served.blocks.match(chain_of("ab"), 2).pages == one.pages[:2]
    served.blocks.close(one)
    assert served.blocks.publish(three, chain_of("ab"), 2) == []
    assert served.blocks.match(chain_of("ab"), 2).pages == three.pages[:2]
    served.blocks.check_integrity()


def test_a_sequence_from_before_a_reset_leaves_nothing():
    served = Served()
    lease, _ = served.begin("abc")
    served.blocks.publish(lease, chain_of("abc"), 2)
    served.blocks.reset()
    assert served.blocks.publish(lease, chain_of("abc"), 3) == []
    assert served.blocks.checkpoint(lease, chain_of("abc"), 3) is None
    assert served.match("abc") == (0, 0)
    served.blocks.close(lease)
    assert served.blocks.free_pages == 1000
    served.blocks.check_integrity()
