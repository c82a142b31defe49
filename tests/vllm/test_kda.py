"""Caches of Kimi Linear and Kimi K3 cross, though nothing here can compute them."""

import json
from typing import Any

import pytest

from .engines import EngineHost


def test_kda_states_and_mla_pages_cross_into_other_blocks_and_nothing_else_changes(engine_host: EngineHost):
    result = json.loads(engine_host.run("kda_caches.py"))
    assert (result["received"], result["failed"]) == (["d"], [])
    assert result["same"] == {"state": True, "pages": [False, True, True, True], "others": False}
    (_, state, state_types), (_, page, page_types) = result["groups"]
    assert state.startswith("MambaSpec")
    assert page == "MLAAttentionSpec 1 heads of 576 bfloat16 64x576 cpu"
    assert (state_types, page_types) == (["bfloat16", "float32"], ["bfloat16"])


@pytest.fixture(scope="module")
def crossed(engine_host: EngineHost) -> list[dict[str, Any]]:
    return json.loads(engine_host.run("rank_caches.py"))


def test_heads_find_their_ranks_between_instances_of_all_numbers_of_ranks(crossed: list[dict[str, Any]]):
    """Also of caches that only GPUs have: heads inside rows, fewer of them than ranks, and MLA."""
    for pair in crossed:
        assert pair["failed"] == [], pair
        assert not any(pair["wrong"]), pair
    assert {tuple(pair["pair"]) for pair in crossed} >= {(1, 2), (2, 1), (4, 1), (1, 4), (4, 2), (4, 4)}


def test_what_several_ranks_hold_crosses_once_and_each_gives_its_share_to_the_others(crossed: list[dict[str, Any]]):
    """The control is in `before`: without the others a rank lacks what it did not fetch."""
    for pair in crossed:
        sources, destinations = pair["pair"]
        assert pair["times"] == {
            "kda": [max(sources, destinations)],
            "gdn": [max(sources, destinations)],
            "attention": [2],  # its heads
            "mla": [1],
        }, pair
        one_layer = [["attention"] if destinations > 2 and rank % 2 else [] for rank in range(destinations)]
        assert pair["before"] == [lacking + ["mla"] * (destinations > 1) for lacking in one_layer], pair
