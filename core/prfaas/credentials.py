"""Reloads the TLS files of a process when they change: those of one directory that `prfaas.names` lists.

A mounted Kubernetes TLS Secret is such a directory. Kubernetes may replace its files at any time. So every look
compares four file stamps. Unusable files (half written, a key without its certificate, expired) are logged once; the
former files stay in use.

A certificate that nobody renews runs out. The process then goes on with its own cluster alone, whose certificates run
out as well (`identity.RanOut`), and with a renewed one it waits until the others have theirs. Before that nothing is
different: OpenSSL itself checks all times.
"""

import datetime
import logging
import os
import ssl
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Final, Generic, NamedTuple, TypeVar

import msgspec

from prfaas import identity
from prfaas.errors import UNREADABLE, ConfigError, PrfaasError
from prfaas.names import TLS_CERT, TLS_KEY, TLS_REVOKED, TLS_SETTLE, TLS_TRUSTED
from prfaas.util import LogOnce, WatchedFiles

log = logging.getLogger(__name__)

FILES: Final = (TLS_CERT, TLS_KEY, TLS_TRUSTED)
RETRY_SECONDS: Final = 1.0
"""Interval of re-reads of unusable files that did not change."""

SETTLE_SECONDS: Final = 180.0
"""A kubelet brings a changed Secret to all pods within this time, where the directory has no TLS_SETTLE."""
_NO_CHECK_TIME: Final = 0x200000
"""X509_V_FLAG_NO_CHECK_TIME of openssl/x509_vfy.h: `identity.check_peer` checks the time instead."""

_Seconds = Annotated[float, msgspec.Meta(ge=0)]
T = TypeVar("T")
C = TypeVar("C", bound=ssl.SSLContext)


class Files(NamedTuple):
    """One consistent reading of the files. `generation` counts the readings."""

    generation: int
    cluster: str
    """The cluster that the certificate names."""
    validity: identity.Validity
    chain_and_key: bytes
    authorities: bytes
    """The bundle in the directory, PEM."""
    trusted: str
    """The bundle in the form that OpenSSL loads."""
    peers: identity.PeerRules
    settle_seconds: float
    """After a late renewal all instances of the cluster have theirs within this time."""

    @property
    def ran_out(self) -> bool:
        """Only the own cluster is reached, and reaches us."""
        return self.peers.ran_out is not None

    @property
    def why_alone(self) -> str:
        """A sentence for that case."""
        if utc_now() < identity.runs_out(self.validity):
            return (
                f"the certificate was renewed late: only cluster {self.cluster!r} is reached until all instances there "
                f"have theirs, for {self.settle_seconds:.0f} s"
            )
        return (
            f"the certificate ends at {self.validity.not_after:%F %R} UTC, and only cluster {self.cluster!r} takes it; "
            "renew it: newer files are used at once"
        )


class CredentialFiles(Generic[T]):
    """Makes an object from the files of a directory, and makes it anew when the files change. Thread-safe.

    `make` may raise OSError where OpenSSL does not take the files. Raises ConfigError for unusable ones at the start.
    """

    def __init__(self, directory: str | Path, make: Callable[[Files], T]):
        self.directory = Path(directory)
        self._make = make
        self._lock = threading.Lock()
        self._watched = WatchedFiles(self.directory / name for name in (*FILES, TLS_REVOKED))
        self._watched.changed()  # from here on
        self._once = LogOnce(log)
        self._retry_at = 0.0
        self._recovering: identity.RanOut | None = None
        self._settled_at = 0.0
        self.problem = ""
        """Why newer files are not in use; empty if they are."""
        try:
            self._files = self._judged(self._read(1))
            self._made = self._use(self._files)
        except PrfaasError as error:
            raise ConfigError(f"--tls-dir {directory}: {error}") from error
        self._warn()

    def now(self) -> T:
        """Return the object for new connections, made anew if the files changed, ran out, or count everywhere again."""
        with self._lock:
            if self._watched.changed() or (self.problem and time.monotonic() >= self._retry_at):
                self._retry_at = time.monotonic() + RETRY_SECONDS
                self._renew()
            if (judged := self._judged(self._files)) is not self._files:
                judged = judged._replace(generation=judged.generation + 1)
                self._made, self._files = self._use(judged), judged
                self._warn()
            return self._made

    def _renew(self) -> None:
        try:
            files = self._read(self._files.generation + 1)
            if (ran_out := self._files.peers.ran_out) is not None:
                self._recovering, self._settled_at = ran_out, time.monotonic() + files.settle_seconds
            files = self._judged(files)
            self._made = self._use(files)
        except PrfaasError as error:
            self.problem = str(error)
            self._once.failed(
                "files", f"new credentials in {self.directory} are not used, the former ones stay: {error}"
            )
        else:
            self._files, self.problem = files, ""
            self._once.forget("files")
            ends = files.validity.not_after
            log.info("credentials of cluster %s are in use, valid until %s", files.cluster, f"{ends:%F %R} UTC")

    def _judged(self, files: Files) -> Files:
        """Return files with whom alone we accept, if they ran out, or others of the cluster have no new ones yet."""
        ran_out = self._recovering if time.monotonic() < self._settled_at else None
        if utc_now() >= identity.runs_out(files.validity):
            ran_out = identity.RanOut(files.cluster, files.validity.not_before)
        if ran_out == files.peers.ran_out:  # nearly always, and each request asks
            return files
        return files._replace(peers=files.peers._replace(ran_out=ran_out))

    def _warn(self) -> None:
        if self._files.ran_out:
            log.warning("%s: %s", self.directory, self._files.why_alone)

    def _read(self, generation: int) -> Files:
        certificate, key, authorities = (self._bytes(name) for name in FILES)
        now = utc_now()
        # At the start there are no former ones, and the own cluster takes an expired one.
        moment = now if generation > 1 else min(now, identity.validity_of_pem(certificate).not_after)
        facts = identity.check(certificate, key, authorities, moment)
        trusted = identity.bundle(authorities).decode()
        peers = identity.PeerRules(self._revoked(), facts.domain)
        chain_and_key, settle_seconds = certificate + b"\n" + key, self._settle_seconds()
        return Files(
            generation, facts.cluster, facts.validity, chain_and_key, authorities, trusted, peers, settle_seconds
        )

    def _revoked(self) -> dict[str, datetime.datetime]:
        if not (self.directory / TLS_REVOKED).exists():
            return {}
        try:
            return identity.read_revoked(self._bytes(TLS_REVOKED))
        except ConfigError as error:
            raise ConfigError(f"{TLS_REVOKED}: {error}") from error

    def _settle_seconds(self) -> float:
        if not (self.directory / TLS_SETTLE).exists():
            return SETTLE_SECONDS
        text = self._bytes(TLS_SETTLE)
        try:
            return msgspec.json.decode(text, type=_Seconds)
        except UNREADABLE as error:
            raise ConfigError(f"{TLS_SETTLE} is {text[:20]!r}; want a number of seconds, as 180") from error

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
    """Return an empty context of TLS 1.3 only. It checks no host names: certificates name clusters."""
    context = kind(side)
    context.check_hostname = False
    context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_3
    return context


def load(context: ssl.SSLContext, files: Files) -> None:
    """Load the checked texts into a context. OpenSSL reads only files, and the files in the directory may change.

    Raises OSError: OpenSSL does not take them.
    """
    with os.fdopen(os.memfd_create("credentials", os.MFD_CLOEXEC), "wb") as file:
        file.write(files.chain_and_key)
        file.flush()
        context.load_cert_chain(f"/proc/self/fd/{file.fileno()}", password="")  # and never asks a terminal
    context.load_verify_locations(cadata=files.trusted)
    check_times(context, files)


def check_times(context: ssl.SSLContext, files: Files) -> None:
    """Let OpenSSL check the times of certificates, unless expired ones count: see `identity.check_peer`."""
    if files.ran_out:
        context.verify_flags |= _NO_CHECK_TIME
    else:
        context.verify_flags &= ~_NO_CHECK_TIME


def utc_now() -> datetime.datetime:
    """Return the time at which certificates are checked."""
    return datetime.datetime.now(datetime.UTC)
