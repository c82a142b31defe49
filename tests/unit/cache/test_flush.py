"""An orderly end leaves on the disk what a restart can use: whole prefixes, the latest first, within time and room."""

import itertools

import pytest

from prfaas_worker.cache.entries import EntryName
from prfaas_worker.cache.tiering import order_by_value
from prfaas_worker.cache.tiers import Tiers

pytestmark = pytest.mark.system

A = list(range(100, 121))
B = list(range(200, 221))
C = list(range(300, 321))
PROMPTS = {"A": A, "B": B, "C": C}
ENTRIES = 6  # five blocks and a state


def load(rig, tokens: list[int]) -> None:
    loading = rig.cache.prefetch(rig.chain(tokens).hashes, len(tokens) - 1)
    if loading is not None and loading.fetch.reading is not None:
        loading.fetch.reading.result()


def found_after_a_restart(new_rig, open_tiers, **options) -> str:
    """Names of the prompts that a new process finds."""
    rig = new_rig(tiers=open_tiers(**options))
    found = ""
    for name, tokens in PROMPTS.items():
        load(rig, tokens)
        found += name if rig.serve(tokens) == 20 else ""
    return found


def steps(count: int):
    """Time for so many looks at the clock."""
    left = itertools.chain([1.0] * count, itertools.repeat(0.0))
    return lambda: next(left)


def served(rig, names: str) -> None:
    for name in names:
        rig.serve(PROMPTS[name])


def test_what_the_device_has_is_found_after_an_orderly_end(new_rig, open_tiers, caplog):
    caplog.set_level("INFO")
    rig = new_rig(tiers=open_tiers())
    served(rig, "ABC")
    rig.cache.flush(lambda: 5.0)
    assert f"keeps {3 * ENTRIES} entries" in caplog.text
    assert "0 entries are left out" in caplog.text
    rig.cache.check_integrity()
    assert found_after_a_restart(new_rig, open_tiers) == "ABC"


def test_without_that_end_nothing_is_found(new_rig, open_tiers):
    """The check itself."""
    rig = new_rig(tiers=open_tiers())
    served(rig, "ABC")
    assert found_after_a_restart(new_rig, open_tiers) == ""


def test_what_host_memory_has_is_kept_too_and_joined_to_what_the_device_has(new_rig, open_tiers):
    rig = new_rig(pages=17, tiers=open_tiers(host_bytes=1 << 20))
    served(rig, "ABC")  # C pushes A out, wholly, and B in part
    assert rig.tiers.host.newest()
    rig.cache.flush(lambda: 5.0)
    assert found_after_a_restart(new_rig, open_tiers) == "ABC"


def test_short_time_is_for_the_prefixes_that_were_of_use_last(new_rig, open_tiers):
    rig = new_rig(tiers=open_tiers())
    served(rig, "ABCA")
    kept = rig.cache._tiering.flush(steps(2 + 2 * ENTRIES))
    assert (kept.entries, kept.left_out) == (2 * ENTRIES, ENTRIES)
    assert found_after_a_restart(new_rig, open_tiers) == "AC"


def test_without_time_nothing_is_written_and_nothing_waited_for(new_rig, open_tiers):
    rig = new_rig(tiers=open_tiers())
    served(rig, "AB")
    kept = rig.cache._tiering.flush(steps(0))
    assert (kept.entries, kept.written_bytes, kept.left_out) == (0, 0, 2 * ENTRIES)


def test_short_room_is_for_the_prefixes_that_were_of_use_last(new_rig, open_tiers):
    """What is there already may have to go for them, but not what was just written."""
    room = 5000
    rig = new_rig(tiers=open_tiers(disk_bytes=room))
    rig.serve(list(range(21)))
    rig.fill()
    rig.tiers.disk.finish(5.0)
    served(rig, "ABC")
    kept = rig.cache._tiering.flush(lambda: 5.0)
    assert 0 < rig.tiers.disk.bytes <= room
    assert kept.left_out > 0
    assert "C" in found_after_a_restart(new_rig, open_tiers, disk_bytes=room)


def test_a_restart_gives_up_first_what_was_of_use_first(new_rig, open_tiers):
    rig = new_rig(tiers=open_tiers())
    served(rig, "ABC")
    rig.cache.flush(lambda: 5.0)
    size = rig.tiers.disk.bytes
    assert found_after_a_restart(new_rig, open_tiers, disk_bytes=size // 2 + 100) in ("C", "BC")


def test_one_entry_that_cannot_be_written_costs_no_other(new_rig, open_tiers):
    rig = new_rig(tiers=open_tiers())
    served(rig, "ABC")
    rig.tiers.disk._path(EntryName(rig.chain(B).hashes[4], True)).mkdir(parents=True)
    kept = rig.cache._tiering.flush(lambda: 5.0)
    assert (kept.entries, kept.left_out) == (3 * ENTRIES - 1, 1)
    assert found_after_a_restart(new_rig, open_tiers) == "AC"


def test_without_a_disk_there_is_nothing_to_keep(new_rig, caplog):
    caplog.set_level("INFO")
    for tiers in (None, Tiers("ab" * 32, host_bytes=1 << 20)):
        rig = new_rig(tiers=tiers)
        rig.serve(A)
        rig.cache.flush(lambda: 5.0)
    assert caplog.text == ""


def test_each_state_stands_right_behind_what_it_needs():
    parent = {"a": "1", "b": "1"}.get
    order = [[(name.key, name.is_state) for name in names] for names in order_by_value("ba", ["z", "a"], parent)]
    assert order == [[("1", False), ("b", False), ("b", True)], [("a", False), ("a", True)], [("z", False)]]
