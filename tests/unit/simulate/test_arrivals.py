"""Proves what arrives: bursts that change the rate and not the load, and prompts that go on from earlier ones."""

import random
from itertools import islice

import pytest

from prfaas.capacity.workload import Workload
from prfaas.errors import ConfigError
from prfaas.simulate.arrivals import BLOCK_TOKENS, Bursts, in_whole_blocks, poisson, sharing
from prfaas.simulate.request import Arrival

LENGTHS = Workload.lognormal(8.0, 1.0, 128, 32_768)
COUNT = 4000


def drawn(bursts: Bursts | None = None):
    return poisson(LENGTHS, 10, 5.0, random.Random(1), bursts)


def test_a_prompt_in_whole_blocks_ends_a_token_behind_the_last_of_them():
    lengths = (511, 512, 513, 1300)
    found = list(in_whole_blocks(Arrival(0.0, one, 1, (7, 8, 9)[: -(-one // 512)]) for one in lengths))
    assert [(one.input_tokens, one.blocks) for one in found] == [(511, ()), (513, (7,)), (513, (7,)), (1025, (7, 8))]


def test_bursts_change_when_requests_come_and_not_how_many_or_which():
    calm = list(islice(drawn(), COUNT))
    bursty = list(islice(drawn(Bursts(every_seconds=100, for_seconds=20, factor=4)), COUNT))
    assert [one.input_tokens for one in calm] == [one.input_tokens for one in bursty]
    assert bursty[-1].at_seconds == pytest.approx(calm[-1].at_seconds, rel=0.05)
    inside = sum(one.at_seconds % 100 < 20 for one in bursty) / COUNT
    assert inside == pytest.approx(4 * 0.2 / (4 * 0.2 + 0.8), abs=0.03)


def test_a_continued_prompt_shares_only_leading_blocks():
    seen: list[tuple[int, ...]] = []
    shared = 0
    for one in islice(sharing(drawn(), 0.5, random.Random(2)), COUNT):
        assert len(one.blocks) == -(-one.input_tokens // BLOCK_TOKENS)
        known = {block for blocks in seen for block in blocks}
        leading = next((i for i, block in enumerate(one.blocks) if block not in known), len(one.blocks))
        assert not known & set(one.blocks[leading:]), "what is new stays new to the end"
        shared += leading > 0
        seen = [*seen[-1200:], tuple(one.blocks)]
        if len(seen) > 400:
            break
    assert 0.3 < shared / len(seen) < 0.6


def test_sharing_changes_neither_times_nor_lengths_and_shares_nothing_at_0():
    plain = list(islice(drawn(), 500))
    alike = list(islice(sharing(drawn(), 0.0, random.Random(2)), 500))
    assert [one[:3] for one in plain] == [one[:3] for one in alike]
    blocks = [block for one in alike for block in one.blocks]
    assert len(blocks) == len(set(blocks))


@pytest.mark.parametrize("share", [-0.1, 1.1, float("nan")])
def test_refuses_an_invalid_share_at_once(share):
    with pytest.raises(ConfigError, match="prefixShare"):
        sharing(drawn(), share, random.Random(2))
