"""The files that a process proves itself with, followed while it serves: tls.crt, tls.key and ca.crt of one directory.

A mounted Kubernetes TLS Secret is such a directory. Its files are replaced at any time, in place or all at once by the
swap of a symlink above them, so every use asks whether they changed: three stat calls. What cannot be used (half
written, a key without its certificate, expired) changes nothing: the former files stay, and the log says why, once.
"""

import datetime
import logging
import os
import ssl
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, Generic, NamedTuple, TypeVar

from prfaas import identity
from prfaas.errors import ConfigError, PrfaasError

log = logging.getLogger(__name__)

CERTIFICATE: Final = "tls.crt"
KEY: Final = "tls.key"
AUTHORITIES: Final = "ca.crt"
FILES: Final = (CERTIFICATE, KEY, AUTHORITIES)
RETRY_SECONDS: Final = 1.0
"""How often files that cannot be used are looked at again although nothing about them changed."""

T = TypeVar("T")
C = TypeVar("C", bound=ssl.SSLContext)
Stamp = tuple[tuple[int, int, int], ...]


class Files(NamedTuple):
    """One reading of the files, found to fit together. `generation` counts those readings."""

    generation: int
    cluster: str
    """The cluster that the certificate names."""
    validity: identity.Validity
    chain_and_key: bytes
    authorities: bytes
    """The bundle as it lies in the directory, PEM."""
    trusted: str
    """The bundle as OpenSSL takes it."""


class CredentialFiles(Generic[T]):
    """What is made of the files of one directory, as of now. May be asked from any thread.

    Args:
        directory: with tls.crt, tls.key and ca.crt.
        make: makes of them what connections use; may raise OSError where OpenSSL does not take them.

    Raises:
        ConfigError: they cannot be used at the start.

    """

    def __init__(self, directory: str | Path, make: Callable[[Files], T]):
        self.directory = Path(directory)
        self._make = make
        self._lock = threading.Lock()
        self._seen = self._stamp()
        self._retry_at = 0.0
        self._problem = ""
        try:
            self._files = self._read(1)
            self._made = self._use(self._files)
        except PrfaasError as error:
            raise ConfigError(f"--tls-dir {directory}: {error}") from error

    @property
    def problem(self) -> str:
        """Why newer files are not in use, empty when nothing is wrong."""
        return self._problem

    def now(self) -> T:
        """Return what new connections are to use, made anew where the files changed."""
        with self._lock:
            stamp = self._stamp()
            if stamp != self._seen or (self._problem and time.monotonic() >= self._retry_at):
                self._seen = stamp
                self._retry_at = time.monotonic() + RETRY_SECONDS
                self._renew()
            return self._made

    def _renew(self) -> None:
        try:
            files = self._read(self._files.generation + 1)
            self._made = self._use(files)
        except PrfaasError as error:
            if str(error) != self._problem:
                log.warning("new credentials in %s are not used, the former ones stay: %s", self.directory, error)
            self._problem = str(error)
        else:
            self._files, self._problem = files, ""
            ends = files.validity.not_after
            log.info("credentials of cluster %s are in use, valid until %s", files.cluster, f"{ends:%F %R} UTC")

    def _stamp(self) -> Stamp:
        """Return what changes when the files do, through symlinks."""
        found: list[tuple[int, int, int]] = []
        for name in FILES:
            try:
                stat = (self.directory / name).stat()
                found.append((stat.st_mtime_ns, stat.st_ino, stat.st_size))
            except OSError:
                found.append((0, 0, 0))
        return tuple(found)

    def _read(self, generation: int) -> Files:
        certificate, key, authorities = (self._bytes(name) for name in FILES)
        facts = identity.check(certificate, key, authorities, utc_now())
        trusted = identity.bundle(authorities).decode()
        return Files(generation, facts.cluster, facts.validity, certificate + b"\n" + key, authorities, trusted)

    def _bytes(self, name: str) -> bytes:
        try:
            return (self.directory / name).read_bytes()
        except OSError as error:
            raise ConfigError(f"{name} cannot be read: {error.strerror}; `prfaas certs issue` writes it") from error

    def _use(self, files: Files) -> T:
        try:
            return self._make(files)
        except OSError as error:
            raise ConfigError(f"OpenSSL does not take these files: {error}; issue them anew") from error


def tls13(kind: type[C], side: int) -> C:
    """Return an empty context of TLS 1.3 alone, in which host names prove nothing: peers are known by their cluster."""
    context = kind(side)
    context.check_hostname = False
    context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_3
    return context


def load(context: ssl.SSLContext, files: Files) -> None:
    """Give a context exactly what was checked: OpenSSL reads files alone, and those in the directory may change.

    Raises:
        OSError: OpenSSL does not take them.

    """
    with os.fdopen(os.memfd_create("credentials", os.MFD_CLOEXEC), "wb") as file:
        file.write(files.chain_and_key)
        file.flush()
        context.load_cert_chain(f"/proc/self/fd/{file.fileno()}", password="")  # and never asks a terminal
    context.load_verify_locations(cadata=files.trusted)


def utc_now() -> datetime.datetime:
    """Return the time by which certificates are judged."""
    return datetime.datetime.now(datetime.UTC)
