"""Whether a disk can be written now.

A write that fails may be the fault of its entry, as a path that something else has taken, or of the whole disk, as one
that is full. The first costs that entry alone. After the second, nothing new is taken for a while and then tried again,
ever more seldom: a disk that has room again is found without anybody's doing. Each change is said once.
"""

import errno
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

log = logging.getLogger(__name__)

FIRST_PAUSE_SECONDS: Final = 1.0
LONGEST_PAUSE_SECONDS: Final = 60.0
_OF_THE_DISK: Final = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.ENODEV, errno.ESTALE}
_TELLING_FAILURES: Final = 3
"""So many failures in a row are no single entry's fault, whatever they say."""


class Condition:
    """What the last writes below a directory tell of its disk."""

    def __init__(self, root: Path, clock: Callable[[], float] = time.monotonic):
        self._root, self._clock = root, clock
        self._failures = 0  # since the last write that went well
        self._pause_seconds = 0.0
        self._retry_at = 0.0

    @property
    def is_paused(self) -> bool:
        """The disk could not be written, and has not been since."""
        return self._pause_seconds > 0

    def takes(self) -> bool:
        """Tell whether to write: always, but for the pauses between attempts on a disk that could not be written."""
        return not self.is_paused or self._clock() >= self._retry_at

    def wrote(self) -> None:
        """Note that an entry was written."""
        if self.is_paused:
            log.warning("The cache tier in %s can be written again", self._root)
        self._failures, self._pause_seconds = 0, 0.0

    def failed(self, path: Path, error: OSError) -> None:
        """Note that an entry could not be written."""
        if not self.takes():  # it was on its way when an earlier one failed
            return
        self._failures += 1
        if error.errno not in _OF_THE_DISK and self._failures < _TELLING_FAILURES and not self.is_paused:
            log.warning("Cache entry %s cannot be written, and is left out: %s", path, error)
            return
        if not self.is_paused:
            log.warning(
                "The cache tier in %s cannot be written: it is only read until that is possible again, which is tried "
                "at least once a minute: %s",
                self._root,
                error,
            )
        self._pause_seconds = min(2 * self._pause_seconds or FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS)
        self._retry_at = self._clock() + self._pause_seconds
