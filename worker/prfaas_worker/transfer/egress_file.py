"""The egress cap from a file that may change while the worker runs, such as a ConfigMap's in a pod.

A pool's cap is shared by its instances, so each one's share changes when their number does. A flag could tell that to a
new process alone; the file reaches those that run, also where nobody can call them, and it is there again after a
restart. While there is such a file it overrides the flag, and is itself overridden by PUT /v1/egress until it changes.
"""

import logging
import threading
import time
from pathlib import Path
from typing import Final

from prfaas_worker.transfer.bucket import TokenBucket

log = logging.getLogger(__name__)

LOOK_SECONDS: Final = 1.0
MAX_MBPS: Final = 100_000_000
_MAX_BYTES: Final = 64


class EgressFile:
    """Keeps a bucket at what the file says in Mbit/s: a whole number from 1; without the file at `otherwise`."""

    def __init__(self, path: Path, bucket: TokenBucket, otherwise: int | None):
        self._path = path
        self._bucket = bucket
        self._otherwise = otherwise
        self._seen: bytes | None = None
        self.look()

    def start(self) -> None:
        """Look every second, in a thread that ends with the process."""
        threading.Thread(target=self._run, name="egress-file", daemon=True).start()

    def look(self) -> None:
        """Read the file and act if it has changed. What is no number changes nothing but the log."""
        try:
            found = self._read()
        except OSError as error:
            log.warning("egress file %s cannot be read, the cap stays as it is: %s", self._path, error)
            return
        if found == self._seen:
            return
        self._seen = found
        text = b"" if found is None else found.strip()
        if found is not None and not (text.isdigit() and 1 <= int(text) <= MAX_MBPS):
            log.error(
                "egress file %s holds %r, the cap stays %s: write Mbit/s as a whole number from 1 to %d",
                *(self._path, text, self._bucket.mbps, MAX_MBPS),
            )
            return
        self._bucket.set_mbps(self._otherwise if found is None else int(text))
        log.info("egress cap: %s Mbit/s", self._bucket.mbps)

    def _read(self) -> bytes | None:
        try:
            with self._path.open("rb") as file:
                return file.read(_MAX_BYTES)
        except (FileNotFoundError, NotADirectoryError):
            return None

    def _run(self) -> None:
        while True:
            time.sleep(LOOK_SECONDS)
            self.look()
