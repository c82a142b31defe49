"""What the device gives up comes back from host memory and disk, within their bounds and over a restart."""

import threading
import time

import pytest

from prfaas.errors import ConfigError
from prfaas.wire.kvevents import BlockStored
from prfaas_worker.cache.disk import DiskTier
from prfaas_worker.cache.tiers import Tiers

from ...waiting import eventually

pytestmark = pytest.mark.system

A = list(range(100, 121))
B = list(range(200, 221))
PAGE, STATE = 128, 3 * 128


def written(rig) -> None:
    """Wait until the disk has what it was given."""

    def is_written() -> bool:
        rig.tiers.poll()
        return not rig.tiers.disk.unwritten_bytes

    eventually(is_written, "the disk has it", poll=0.002)


def load(rig, tokens: list[int]) -> bool:
    """Do what the engine does when a request arrives; tells whether something had to come from below."""
    loading = rig.cache.prefetch(rig.chain(tokens).hashes, len(tokens) - 1)
    eventually(lambda: loading is None or loading.done(), "it is loaded", poll=0.002)
    return loading is not None


def test_what_the_device_gave_up_comes_back_from_host_memory(new_rig, open_tiers):
    rig = new_rig(tiers=open_tiers(host_bytes=1 << 20))
    rig.serve(A)
    rig.fill()
    assert rig.cache.stats().host_bytes == 5 * PAGE + STATE
    assert load(rig, A)
    assert rig.serve(A) == 20
    stats = rig.cache.stats()
    assert (stats.host_hit_tokens, stats.disk_hit_tokens, stats.disk_bytes) == (20, 0, 0)
    assert not load(rig, A)


def test_what_falls_out_of_host_memory_goes_to_the_disk(new_rig, open_tiers):
    room = 5 * PAGE + STATE
    rig = new_rig(tiers=open_tiers(host_bytes=room))
    for prompt in (A, B):
        rig.serve(prompt)
        rig.fill()
    written(rig)
    assert rig.cache.stats().host_bytes <= room
    assert rig.cache.stats().disk_bytes > room
    assert load(rig, A)
    assert rig.serve(A) == 20
    assert rig.cache.stats().disk_hit_tokens == 20


def test_a_restart_keeps_the_disk_and_tells_of_it(new_rig, open_tiers):
    rig = new_rig(tiers=open_tiers())
    rig.serve(A)
    rig.fill()
    written(rig)
    rig = new_rig(tiers=open_tiers())
    told = [event for event in rig.events if isinstance(event, BlockStored)]
    assert {event.medium for event in told} == {"STORAGE"}
    blocks = {event.block_hashes[0]: event for event in told if event.group_idx == 0}
    assert list(rig.chain(A).hashes) == sorted(blocks, key=rig.chain(A).hashes.index)
    assert [token for key in rig.chain(A).hashes for token in blocks[key].token_ids] == A[:20]
    assert load(rig, A)
    assert rig.serve(A) == 20


def test_without_asking_first_the_tiers_below_are_not_waited_for(new_rig, open_tiers):
    rig = new_rig(tiers=open_tiers())
    rig.serve(A)
    rig.fill()
    written(rig)
    assert rig.serve(A) == 0


def test_the_disk_holds_no_more_than_it_may(new_rig, open_tiers, tmp_path):
    rig = new_rig(tiers=open_tiers(disk_bytes=20_000))
    for start in range(0, 4000, 100):
        rig.serve(list(range(start, start + 21)))
        rig.fill()
        written(rig)
    stats = rig.cache.stats()
    assert 15_000 < stats.disk_bytes <= 20_000
    rig.tiers.disk._writer.submit(lambda: None).result()
    assert sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()) == stats.disk_bytes
    last = list(range(3900, 3921))
    assert load(rig, last)
    assert rig.serve(last) == 20
    assert not load(rig, list(range(21)))


def test_two_prompts_that_want_the_same_read_it_once(new_rig, open_tiers):
    rig = new_rig(tiers=open_tiers())
    rig.serve(A)
    rig.fill()
    written(rig)
    chain = rig.chain(A).hashes
    go_on = threading.Event()
    rig.tiers.disk._reader.submit(go_on.wait)
    first, second = rig.cache.prefetch(chain, 20), rig.cache.prefetch(chain, 20)
    go_on.set()
    assert len(first.fetch.from_disk) == 6
    assert not second.fetch.from_disk
    while not second.done():
        time.sleep(0.002)
    assert first.done()
    assert rig.serve(A) == 20


def test_a_reset_forgets_all_tiers(new_rig, open_tiers, tmp_path):
    rig = new_rig(tiers=open_tiers(host_bytes=5 * PAGE + STATE))
    for prompt in (A, B):
        rig.serve(prompt)
        rig.fill()
    rig.cache.reset()
    assert not load(rig, A)
    assert not load(rig, B)
    stats = rig.cache.stats()
    assert (stats.host_bytes, stats.disk_bytes) == (0, 0)
    rig.tiers.disk._writer.submit(lambda: None).result()
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_a_reset_while_a_prompt_is_being_loaded_leaves_nothing_of_it(new_rig, open_tiers):
    rig = new_rig(tiers=open_tiers())
    rig.serve(A)
    rig.fill()
    written(rig)
    rig.cache.prefetch(rig.chain(A).hashes, 20)
    rig.cache.reset()
    assert rig.serve(A) == 0


def test_a_pool_too_small_for_what_lies_below_computes_instead(new_rig, open_tiers):
    rig = new_rig(tiers=open_tiers())
    rig.serve(A)
    rig.fill()
    written(rig)
    small = new_rig(pages=12, tiers=open_tiers())
    assert not load(small, A)
    assert small.serve(A) == 0


def test_a_directory_has_one_owner(open_tiers, tmp_path):
    open_tiers()
    with pytest.raises(ConfigError, match="another worker's"):
        DiskTier(tmp_path, 1 << 20, "ab" * 32)


def test_a_directory_that_cannot_be_made_is_said_at_the_start(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="writable directory"):
        DiskTier(tmp_path / "file", 1 << 20, "ab" * 32)


def test_a_disk_that_cannot_be_written_is_said_once_and_gone_without(new_rig, open_tiers, monkeypatch, caplog):
    rig = new_rig(tiers=open_tiers())
    monkeypatch.setattr("os.fsync", lambda _: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    for prompt in (A, B):
        rig.serve(prompt)
        rig.fill()
        written(rig)
    assert len([record for record in caplog.records if "No space" in record.getMessage()]) == 1
    assert rig.cache.stats().disk_bytes == 0
    assert rig.serve(A) == 0


class Copies:
    """Counts the copies between device and host, and what they held."""

    def __init__(self, rig, monkeypatch: pytest.MonkeyPatch):
        self.down: list[int] = []
        self.up: list[int] = []
        for name, into in (("read_pages", self.down), ("write_pages", self.up)):
            monkeypatch.setattr(rig.memory, name, self._counting(getattr(rig.memory, name), into))

    def _counting(self, real, into: list[int]):
        def counted(pages, *content):
            into.append(len(pages))
            return real(pages, *content)

        return counted


def test_what_gives_way_together_is_copied_together_and_so_is_what_comes_back(new_rig, open_tiers, monkeypatch):
    rig = new_rig(tiers=open_tiers(host_bytes=1 << 20))
    for prompt in (A, B):
        rig.serve(prompt)
    copies = Copies(rig, monkeypatch)
    rig.fill()
    assert copies.down == [2 * (5 + 3)]  # twelve entries
    load(rig, A)
    assert rig.serve(A) == 20
    assert copies.up == [5 + 3]


def test_no_copy_is_larger_than_its_bound(new_rig, open_tiers, monkeypatch):
    monkeypatch.setattr("prfaas_worker.cache.tiering.MAX_COPY_BYTES", 4 * PAGE)
    rig = new_rig(tiers=open_tiers(host_bytes=1 << 20))
    rig.serve(A)
    copies = Copies(rig, monkeypatch)
    rig.fill()
    assert copies.down == [4, 4]
    load(rig, A)
    assert rig.serve(A) == 20
    assert copies.up == [4, 4]


def test_what_comes_back_into_too_little_room_goes_down_again_with_its_own_bytes(new_rig):
    rig = new_rig(pages=17, tiers=Tiers("ab" * 32, host_bytes=5 * PAGE + STATE))
    rig.serve(A)
    rig.fill()
    expected = {name: bytes(rig.tiers.host.peek(name).payload) for name in rig.tiers.host.newest()}
    rig.serve(B)
    lease = rig.cache.open([], 4, 0).lease
    rig.cache.prefetch(rig.chain(A).hashes, 20)
    assert rig.cache.grow(lease, 4 * 14)  # B takes A's place in host memory, and three pages are left
    rig.cache.prefetch([], 0)
    again = {name: rig.tiers.host.peek(name) for name in expected if rig.tiers.host.peek(name)}
    assert again
    assert all(bytes(entry.payload) == expected[name] for name, entry in again.items())
    rig.cache.check_integrity()
