"""An entry that cannot be written or read costs itself alone; a disk that cannot be written is tried again later."""

import errno
import os
from pathlib import Path

import pytest

from prfaas_worker.cache.disk import MAX_PAUSE_SECONDS, DiskHealth
from prfaas_worker.cache.entries import EntryName

pytestmark = pytest.mark.system

A = list(range(100, 121))
B = list(range(200, 221))


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def rig(new_rig, open_tiers, clock):
    rig = new_rig(tiers=open_tiers())
    rig.tiers.disk.health._clock = clock
    return rig


def push_out(rig, tokens: list[int]) -> None:
    rig.serve(tokens)
    rig.fill()
    rig.tiers.disk.finish(20.0)


def again(rig, tokens: list[int]) -> int:
    """Tokens of a prompt that the tiers bring back."""
    loading = rig.cache.prefetch(rig.chain(tokens).hashes, 20)
    if loading is not None:
        loading.fetch.reading.result()
    return rig.serve(tokens)


def path_of(rig, tokens: list[int], block: int, is_state: bool = False) -> Path:
    return rig.tiers.disk._path(EntryName(rig.chain(tokens).hashes[block], is_state))


class FullDisk:
    """A disk that has no room until it has."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, code: int = errno.ENOSPC):
        self.is_full, self.attempts = True, 0
        self._code = code
        self._fsync = os.fsync
        monkeypatch.setattr("os.fsync", self)

    def __call__(self, file: int) -> None:
        self.attempts += 1
        if self.is_full:
            raise OSError(self._code, os.strerror(self._code))
        self._fsync(file)


def messages(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records]


def test_a_path_that_is_taken_costs_its_own_entry_alone(rig, caplog):
    path_of(rig, A, 2).mkdir(parents=True)
    push_out(rig, A)
    push_out(rig, B)
    assert again(rig, A) == 0
    assert again(rig, B) == 20
    stats = rig.cache.stats()
    assert (stats.disk_failures, stats.disk_paused) == (1, False)
    assert [str(path_of(rig, A, 2)) in text for text in messages(caplog)] == [True]


def test_an_entry_that_cannot_be_read_costs_itself_alone(rig, tmp_path):
    push_out(rig, A)
    push_out(rig, B)
    lost = path_of(rig, A, 2)
    lost.unlink()
    lost.mkdir()
    assert again(rig, A) == 0
    assert again(rig, B) == 20
    stats = rig.cache.stats()
    assert (stats.disk_failures, stats.corrupt_entries, stats.disk_paused) == (1, 0, False)


def test_a_process_without_files_left_to_open_loses_no_entries(rig, monkeypatch):
    push_out(rig, A)

    def too_many(*_: object, **__: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as broken:
        broken.setattr(Path, "open", too_many)
        assert again(rig, A) == 0
    rig.fill()
    assert again(rig, A) == 20


def test_a_folder_that_cannot_be_listed_hides_its_own_entries_alone(new_rig, open_tiers, monkeypatch):
    rig = new_rig(tiers=open_tiers())
    push_out(rig, A)
    push_out(rig, B)
    hidden, real = path_of(rig, A, 2).parent, Path.iterdir

    def listed(folder: Path):
        if folder == hidden:
            raise PermissionError(errno.EACCES, "Permission denied")
        return real(folder)

    monkeypatch.setattr(Path, "iterdir", listed)
    rig = new_rig(tiers=open_tiers())
    assert (again(rig, A), again(rig, B)) == (0, 20)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS])
def test_a_full_disk_is_said_once_and_asked_seldom(rig, monkeypatch, caplog, clock, code):
    disk = FullDisk(monkeypatch, code)
    for start in range(0, 2000, 100):
        push_out(rig, list(range(start, start + 21)))
        clock.now += 0.01
    assert disk.attempts <= 6  # what was on its way together
    assert len(messages(caplog)) == 1
    assert "cannot be written: the worker only reads it, and tries to write again" in caplog.text
    assert rig.cache.stats().disk_paused is True
    assert rig.cache.stats().disk_bytes == 0


def test_what_a_full_disk_has_is_still_read(rig, monkeypatch):
    push_out(rig, A)
    FullDisk(monkeypatch)
    push_out(rig, B)
    assert (again(rig, A), again(rig, B)) == (20, 0)


def test_a_disk_with_room_again_is_written_again(rig, monkeypatch, caplog, clock):
    disk = FullDisk(monkeypatch)
    push_out(rig, A)
    disk.is_full = False
    push_out(rig, B)
    assert again(rig, B) == 0  # not tried yet
    clock.now += 1.0
    rig.fill()
    rig.tiers.disk.finish(20.0)
    assert again(rig, B) == 20
    assert rig.cache.stats().disk_paused is False
    assert "can be written again" in messages(caplog)[-1]


def failing(health: DiskHealth, code: int, times: int) -> None:
    for number in range(times):
        health.failed(Path(f"entry-{number}"), OSError(code, os.strerror(code)))


def test_pauses_grow_up_to_a_minute_and_end_with_the_first_success(clock):
    health = DiskHealth(Path("cache"), clock)
    pauses = []
    for _ in range(9):
        failing(health, errno.ENOSPC, 3)  # stragglers make a pause no longer
        began = clock.now
        while not health.can_write():
            clock.now += 0.5
        pauses.append(clock.now - began)
    assert pauses == [1, 2, 4, 8, 16, 32, MAX_PAUSE_SECONDS, MAX_PAUSE_SECONDS, MAX_PAUSE_SECONDS]
    health.succeeded()
    assert (health.can_write(), health.is_paused) == (True, False)
    failing(health, errno.ENOSPC, 1)
    clock.now += 1.0
    assert health.can_write()


def test_failures_that_do_not_end_are_the_disks_whatever_they_say(clock):
    health = DiskHealth(Path("cache"), clock)
    for _ in range(5):
        failing(health, errno.EACCES, 2)
        health.succeeded()
    assert not health.is_paused
    failing(health, errno.EACCES, 3)
    assert health.is_paused
