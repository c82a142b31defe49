"""Every rank gets the heads that its own engine would have computed, whatever the numbers of ranks on both sides."""

import itertools

import pytest

from prfaas.errors import ConfigError
from prfaas_vllm.ranks import HeadMap, HeadRows, HeadSection, RankOf, bytes_of, copies_of, divides, runs_of, share_of

GDN: HeadMap = (
    HeadRows(3, (HeadSection(8, 4), HeadSection(8, 4), HeadSection(16, 4))),  # the convolution's rows of q, k and v
    HeadRows(1, (HeadSection(16, 20),)),
)
CHANNELS_FIRST: HeadMap = (HeadRows(1, (HeadSection(8, 12), HeadSection(8, 12), HeadSection(16, 12))),)
HEADS_OUTSIDE: HeadMap = (HeadRows(1, (HeadSection(8, 24),)),)
HEADS_INSIDE: HeadMap = (HeadRows(6, (HeadSection(8, 4),)),)
FEW_HEADS: HeadMap = (HeadRows(2, (HeadSection(2, 8),)),)
LATENTS: HeadMap = (HeadRows(1, (HeadSection(1, 40),)),)
TENSORS = {
    "gdn": GDN,
    "channels first": CHANNELS_FIRST,
    "heads outside": HEADS_OUTSIDE,
    "heads inside": HEADS_INSIDE,
    "fewer heads than ranks": FEW_HEADS,
    "latents": LATENTS,
}
SIZES = (1, 2, 4, 8)


def memory(tensor: HeadMap, rank: RankOf) -> list[tuple[int, ...]]:
    """What a rank's block holds: of each byte the part, row, section, head and place in the head."""
    found: list[tuple[int, ...]] = []
    for at, (rows, sections) in enumerate(tensor):
        for row in range(rows):
            for number, (heads, size) in enumerate(sections):
                first, count = rank.heads(heads)
                found += [(at, row, number, head, byte) for head in range(first, first + count) for byte in range(size)]
    return found


def places(tensor: HeadMap, holder: RankOf, part: RankOf) -> list[int]:
    """The bytes of a slice in a block, in the order in which it travels."""
    runs, own = runs_of(tensor, holder, part), runs_of(tensor, part, part)
    order = {
        mine.first + row * mine.apart + byte: theirs.first + row * theirs.apart + byte
        for mine, theirs in zip(own, runs, strict=True)
        for row in range(mine.rows)
        for byte in range(mine.width)
    }
    assert sorted(order) == list(range(bytes_of(tensor, part))), "a slice has no gap"
    return [order[at] for at in range(len(order))]


@pytest.mark.parametrize(("sources", "destinations"), list(itertools.product(SIZES, SIZES)))
@pytest.mark.parametrize("tensor", TENSORS.values(), ids=TENSORS)
def test_every_rank_gets_what_its_own_engine_would_have_computed(tensor: HeadMap, sources: int, destinations: int):
    for number in range(destinations):
        rank = RankOf(number, destinations)
        room: list[tuple[int, ...] | None] = [None] * bytes_of(tensor, rank)
        for part in rank.slices(sources):
            source = part.within(sources)
            assert part in source.slices(destinations), "the source offers it"
            held = memory(tensor, source)
            sent = [held[at] for at in places(tensor, source, part)]
            assert sent == memory(tensor, part)
            for at, byte in zip(places(tensor, rank, part), sent, strict=True):
                room[at] = byte
        assert room == memory(tensor, rank)


@pytest.mark.parametrize("ranks", SIZES)
@pytest.mark.parametrize("tensor", TENSORS.values(), ids=TENSORS)
def test_layers_cross_once_for_all_ranks_that_hold_the_same(tensor: HeadMap, ranks: int):
    layers, copies = (3, 5, 7, 11, 13, 17, 19), copies_of((tensor,), ranks)
    parts = [RankOf(at, ranks) for at in range(ranks)]
    crossed: dict[tuple[tuple[int, ...], ...], list[int]] = {}
    for part in parts:
        shared = share_of(layers, copies, part)
        assert len(shared) in (len(layers) // copies, -(-len(layers) // copies)), "shares are equal but for one layer"
        crossed.setdefault(tuple(memory(tensor, part)), []).extend(shared)
    for held, found in crossed.items():
        assert sorted(found) == list(layers), f"ranks that hold {held[0]} and more"


def test_ranks_that_differ_in_one_tensor_share_nothing():
    assert copies_of((LATENTS,), 8) == 8
    assert copies_of((FEW_HEADS,), 8) == copies_of((LATENTS, FEW_HEADS), 8) == 4
    assert copies_of((GDN, LATENTS), 8) == 1
    assert copies_of((), 8) == 1, "unknown heads"


def test_distinguishes_ranks_and_heads_that_do_not_divide():
    with pytest.raises(ConfigError, match="the other instance has 3 tensor-parallel ranks and this one 2"):
        RankOf(0, 2).slices(3)
    assert divides(FEW_HEADS, 8)
    assert divides(GDN, 4)
    assert not divides(GDN, 3)
    assert not divides((HeadRows(1, (HeadSection(6, 8),)),), 4)
