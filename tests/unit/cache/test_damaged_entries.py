"""A file of the disk tier that is not exactly what was written is never used: the prompt is computed, the file counted.

Every test has the same negative control: the same steps with the file left alone do find the prefix.
"""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from prfaas_worker.cache.entries import _FIXED

from ...waiting import eventually

pytestmark = pytest.mark.system

A = list(range(100, 121))
HEADER = _FIXED.size + 4 * 4 + 8
Damage = Callable[[Path], None]


def flip(at: int) -> Damage:
    def damage(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[at] ^= 0x40
        path.write_bytes(data)

    return damage


def cut(size: int) -> Damage:
    return lambda path: os.truncate(path, size)


def longer(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def another_ones(path: Path) -> None:
    other = next(one for one in path.parent.parent.glob("*/*.block") if one != path)
    path.write_bytes(other.read_bytes())


def nothing(_: Path) -> None:
    pass


REGIONS = {
    "magic": flip(0),
    "version": flip(8),
    "kind": flip(10),
    "fingerprint": flip(12),
    "key": flip(44),
    "parent": flip(76),
    "tokens": flip(108),
    "payload length": flip(112),
    "payload digest": flip(120),
    "token ids": flip(_FIXED.size + 3),
    "header digest": flip(HEADER - 1),
    "first byte of the payload": flip(HEADER),
    "last byte of the payload": flip(-1),
    "empty": cut(0),
    "cut in the header": cut(50),
    "cut behind the header": cut(HEADER),
    "cut by a byte": cut(HEADER + 127),
    "a byte too long": longer,
    "another entry's file": another_ones,
}


def on_disk(new_rig, open_tiers):
    rig = new_rig(tiers=open_tiers())
    rig.serve(A)
    rig.fill()
    rig.tiers.disk._writer.submit(lambda: None).result()
    rig.tiers.poll()
    return rig


def third_block(rig, folder: Path) -> Path:
    (path,) = folder.rglob(f"{rig.chain(A).hashes[2].hex()}.block")
    return path


def serve(rig) -> int:
    loading = rig.cache.prefetch(rig.chain(A).hashes, 20)
    eventually(lambda: loading is None or loading.done(), "it is loaded", poll=0.002)
    return rig.serve(A)  # which looks at every row and the state that it was given


@pytest.mark.parametrize("damage", REGIONS.values(), ids=REGIONS)
def test_a_file_damaged_while_we_run_is_not_used(new_rig, open_tiers, tmp_path, damage):
    rig = on_disk(new_rig, open_tiers)
    path = third_block(rig, tmp_path)
    damage(path)
    assert serve(rig) == 0
    assert rig.cache.stats().corrupt_entries == 1
    assert not path.exists()
    rig.fill()
    rig.tiers.disk._writer.submit(lambda: None).result()
    assert serve(rig) == 20  # written anew


@pytest.mark.parametrize("damage", REGIONS.values(), ids=REGIONS)
def test_a_file_damaged_while_we_were_away_is_not_used(new_rig, open_tiers, tmp_path, damage):
    path = third_block(on_disk(new_rig, open_tiers), tmp_path)
    damage(path)
    rig = new_rig(tiers=open_tiers())
    assert serve(rig) == 0
    assert rig.cache.stats().corrupt_entries == 1
    assert not path.exists()


def test_left_alone_the_files_are_used(new_rig, open_tiers, tmp_path):
    nothing(third_block(on_disk(new_rig, open_tiers), tmp_path))
    rig = new_rig(tiers=open_tiers())
    assert serve(rig) == 20
    assert rig.cache.stats().corrupt_entries == 0


def test_a_damaged_state_is_not_used_either(new_rig, open_tiers, tmp_path):
    rig = on_disk(new_rig, open_tiers)
    (path,) = tmp_path.rglob("*.state")
    flip(-1)(path)
    assert serve(rig) == 0
    assert rig.cache.stats().corrupt_entries == 1


def test_a_file_that_is_gone_is_no_damage(new_rig, open_tiers, tmp_path):
    rig = on_disk(new_rig, open_tiers)
    third_block(rig, tmp_path).unlink()
    assert serve(rig) == 0
    assert rig.cache.stats().corrupt_entries == 0


def test_a_half_written_file_is_removed_at_the_start(new_rig, open_tiers, tmp_path):
    rig = on_disk(new_rig, open_tiers)
    leftover = third_block(rig, tmp_path).parent.parent / "7.tmp"
    leftover.write_bytes(b"PFXCACHE")
    rig = new_rig(tiers=open_tiers())
    assert not leftover.exists()
    assert rig.cache.stats().corrupt_entries == 0
    assert serve(rig) == 20


def test_another_models_entries_are_left_alone(new_rig, open_tiers, tmp_path):
    path = third_block(on_disk(new_rig, open_tiers), tmp_path)
    rig = new_rig(tiers=open_tiers(fingerprint="cd" * 32))
    assert serve(rig) == 0
    assert path.exists()


def test_a_file_of_another_model_in_our_folder_is_refused(new_rig, open_tiers, tmp_path):
    on_disk(new_rig, open_tiers)
    beginning = "ab" * 8 + "cd" * 24  # shares the folder's name
    rig = new_rig(tiers=open_tiers(fingerprint=beginning))
    assert serve(rig) == 0
    assert rig.cache.stats().corrupt_entries == 6
