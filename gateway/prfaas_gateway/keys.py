"""API keys from a folder, as a mounted Kubernetes Secret is one: one file a client, named after it.

A file holds keys, one a line, each as it is or as `sha256:` and 64 hexadecimal digits; or, with limits, a JSON object:

    {"keys": ["sha256:..."], "maxInFlight": 8, "requestsPerMinute": 600, "tokensPerMinute": 200000}

Only digests stay in memory. A key that comes is looked up by a keyed hash of its digest, whose key nobody outside this
process knows: the time of a look-up tells nothing about the keys that exist. Every second that a request comes in, the
folder is looked at again. A file that cannot be used lets nobody in, and a folder that cannot be read changes nothing;
the log says either once, and never a word of what stands in a file.
"""

import hashlib
import logging
import os
import re
import secrets
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from prfaas.errors import ConfigError

log = logging.getLogger(__name__)

LOOK_SECONDS: Final = 1.0
MAX_FILES: Final = 10_000
MAX_FILE_BYTES: Final = 64 * 1024
_KEY = re.compile(rb"[!-~]{16,512}")
_DIGEST = re.compile(rb"sha256:([0-9a-f]{64})")

Limit = Annotated[int, Meta(ge=1, le=1 << 40)]


class Client(msgspec.Struct, frozen=True):
    """Who a key belongs to, and what they may do in each gateway; None: without a limit."""

    name: str
    max_in_flight: int | None = None
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None


class _Document(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    keys: list[str]
    max_in_flight: Limit | None = None
    requests_per_minute: Limit | None = None
    tokens_per_minute: Limit | None = None


class KeyRing:
    """The keys of a folder, as of the last second.

    Args:
        folder: one file a client; names that begin with a dot do not count.
        clock: monotonic seconds.

    Raises:
        ConfigError: the folder cannot be read at the start.

    """

    def __init__(self, folder: Path, clock: Callable[[], float] = time.monotonic):
        self._folder = folder
        self._clock = clock
        self._secret = secrets.token_bytes(32)
        self._problems: dict[str, str] = {}
        self._clients: Mapping[bytes, Client] = {}
        self._stamp: list[tuple[str, int, int, int]] = []
        self._look_at = 0.0
        try:
            self._look()
        except OSError as error:
            raise ConfigError(f"--keys-dir {folder}: {error.strerror}") from error

    def client(self, key: bytes) -> Client | None:
        """Return whose key this is, or None."""
        if self._clock() >= self._look_at:
            self._follow()
        return self._clients.get(self._hidden(hashlib.sha256(key).digest()))

    def _follow(self) -> None:
        try:
            self._look()
            self._problems.pop("", None)
        except OSError as error:
            self._look_at = self._clock() + LOOK_SECONDS
            self._tell("", f"--keys-dir {self._folder} cannot be read, the keys known so far stay: {error.strerror}")

    def _look(self) -> None:
        """Read the folder again if it changed."""
        stamp = self._found()
        self._look_at = self._clock() + LOOK_SECONDS
        if stamp == self._stamp:
            return
        clients: dict[bytes, Client] = {}
        for name, *_ in stamp:
            try:
                document = _read(self._folder / name)
                client = Client(name, document.max_in_flight, document.requests_per_minute, document.tokens_per_minute)
                clients |= {self._hidden(_digest(key.encode())): client for key in document.keys}
                self._problems.pop(name, None)
            except (OSError, ConfigError) as error:
                reason = error.strerror if isinstance(error, OSError) else error
                self._tell(name, f"the file {name!r} in --keys-dir lets nobody in: {reason}")
        self._problems = {name: said for name, said in self._problems.items() if name in {one[0] for one in stamp}}
        self._clients, self._stamp = clients, stamp
        log.info("%d API keys are in use", len(clients))

    def _found(self) -> list[tuple[str, int, int, int]]:
        """Return what changes when a file does, through symlinks."""
        found: list[tuple[str, int, int, int]] = []
        with os.scandir(self._folder) as entries:
            for entry in entries:
                if entry.name.startswith(".") or not entry.is_file():
                    continue
                stat = entry.stat()
                found.append((entry.name, stat.st_mtime_ns, stat.st_ino, stat.st_size))
                if len(found) > MAX_FILES:
                    raise OSError(0, f"it holds more than {MAX_FILES} files")
        return sorted(found)

    def _tell(self, name: str, problem: str) -> None:
        if self._problems.get(name) != problem:
            log.error("%s", problem)
        self._problems[name] = problem

    def _hidden(self, digest: bytes) -> bytes:
        return hashlib.blake2b(digest, key=self._secret, digest_size=16).digest()


def _read(path: Path) -> _Document:
    """Return what a file says. Raises ConfigError, which repeats nothing of it, and OSError."""
    with path.open("rb") as file:
        content = file.read(MAX_FILE_BYTES + 1)
    if len(content) > MAX_FILE_BYTES:
        raise ConfigError(f"it has more than {MAX_FILE_BYTES} bytes")
    if content.lstrip().startswith(b"{"):
        try:
            document = msgspec.json.decode(content, type=_Document)
        except msgspec.ValidationError as error:
            raise ConfigError(f"{error}") from None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            raise ConfigError("it begins like JSON and is none") from None
    else:
        document = _Document([line.strip().decode("ascii", "replace") for line in content.splitlines() if line.strip()])
    if not document.keys:
        raise ConfigError("it holds no key")
    return document


def _digest(key: bytes) -> bytes:
    """Return a key's SHA-256, of which the file may hold the digest alone."""
    if key.lower().startswith(b"sha256:"):
        if digest := _DIGEST.fullmatch(key):
            return bytes.fromhex(digest[1].decode())
        raise ConfigError("after sha256: want 64 hexadecimal digits, lower case")
    if not _KEY.fullmatch(key):
        raise ConfigError("a key must have 16 to 512 characters, printable ASCII without spaces")
    return hashlib.sha256(key).digest()
