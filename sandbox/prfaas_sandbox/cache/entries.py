"""Folders of the cache: each is there whole, or is not used.

A folder is made under another name, marked, and moved into place. One without its mark belongs to a maker that was
killed. It is deleted and made again, never completed: a second `uv pip sync` takes a half-installed package for an
installed one.
"""

import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from prfaas.errors import ConfigError
from prfaas_sandbox.progress import OnProgress

CACHE_VARIABLE: Final = "PRFAAS_CACHE_DIR"
COMPLETE: Final = ".complete"
UNFINISHED: Final = ".new"


def cache_folder() -> Path:
    """Return the cache: $PRFAAS_CACHE_DIR, else prfaas/ in the user's cache folder."""
    if chosen := os.environ.get(CACHE_VARIABLE):
        return Path(chosen).absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "prfaas"


def is_whole(folder: Path) -> bool:
    """Return whether a folder of the cache was made to its end."""
    return (folder / COMPLETE).exists()


def ensure_folder(name: str, make: Callable[[Path], None], report: OnProgress) -> Path:
    """Return the folder of this name. `make` fills an empty one, which is moved, if there is none that is whole.

    Raises ConfigError where the cache cannot be written, and what else `make` raises; then nothing of it is left.
    """
    folder = cache_folder() / name
    if not is_whole(folder):
        with locked(report):
            if not is_whole(folder):  # the maker that we waited for may have made it
                _make(folder, make)
    return folder


def _make(folder: Path, make: Callable[[Path], None]) -> None:
    parts = folder.with_name(folder.name + UNFINISHED)
    try:
        for left in folder.parent.glob(f"*{UNFINISHED}"):  # no other maker is alive: we hold the lock
            shutil.rmtree(left)
        parts.mkdir()
        make(parts)
        (parts / COMPLETE).touch()
        if folder.exists():
            shutil.rmtree(folder)
        parts.rename(folder)
    except OSError as error:
        raise _unusable(error) from error
    finally:
        shutil.rmtree(parts, ignore_errors=True)


def _unusable(error: OSError) -> ConfigError:
    return ConfigError(
        f"cannot write the cache folder {cache_folder()} ({error}): make room, or set {CACHE_VARIABLE} to a folder "
        "that you can write"
    )


@contextmanager
def locked(report: OnProgress) -> Iterator[None]:
    """Hold the cache's lock; report another build that holds it, and wait."""
    folder = cache_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / "build.lock").open("w")
    except OSError as error:
        raise _unusable(error) from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report("another build is running; waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
