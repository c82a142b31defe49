"""Authenticates clients and limits them: API keys from a folder, and each owner's rate limits and requests at once.

The folder holds one file a client, named after the client, as a mounted Kubernetes Secret does. A file holds keys, one
a line, each in plain text or as `sha256:` and 64 hexadecimal digits. Or, with limits, it holds a JSON object:

    {"keys": ["sha256:..."], "maxInFlight": 8, "requestsPerMinute": 600, "tokensPerMinute": 200000}

A key is checked before its request's body is read. So a request without a key costs a hash and no memory. Only digests
stay in memory. A look-up uses a keyed hash of the digest, with a secret of this process. So its duration reveals
nothing about existing keys. An unusable file admits no client, nor does one with the name of an earlier file, and a key
stays that of the first file with it; an unreadable folder changes nothing. The log reports each once, without a file's
content.

A client's first key also isolates its cached prompts: the salt that engines get is made of that key, of the client and
of the salt that it sent. So no client can name another's, all gateways make the same one, and it survives restarts.
"""

import hashlib
import logging
import math
import os
import re
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Final

import msgspec
from aiohttp import web
from msgspec import Meta

from prfaas.errors import UNREADABLE, ConfigError, RequestError
from prfaas.routing.estimate import TokenEstimator
from prfaas.routing.prompt_size import PromptSize
from prfaas.util import LogOnce, RateBucket, Stamp, file_stamp
from prfaas_gateway.api import Answers
from prfaas_gateway.openai import LimitError

log = logging.getLogger(__name__)

POLL_SECONDS: Final = 1.0
MAX_FILES: Final = 10_000
MAX_FILE_BYTES: Final = 64 * 1024
KEY_DIGEST_DIGITS: Final = 8
MINUTE_SECONDS: Final = 60.0
_SCHEME: Final = "bearer "
_KEY_HEADER: Final = "x-api-key"  # of Anthropic's clients
_KEY: Final = re.compile(rb"[!-~]{16,512}")
_DIGEST: Final = re.compile(rb"sha256:([0-9a-f]{64})")
_SALTS: Final = b"prfaas cache salts\n"
"""Before a key's digest: the secret of salts opens nothing."""
_OF_NOTHING: Final = hashlib.sha256(b"").digest()

Limit = Annotated[int, Meta(ge=1, le=1 << 40)]


class ApiClient(msgspec.Struct, frozen=True):
    """The owner of keys and its limits in each gateway; None: no limit."""

    name: str
    max_in_flight: int | None = None
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    cache_secret: bytes = b""
    """Made of its first key, 32 bytes."""

    def cache_salt(self, sent: str) -> str:
        """Return the salt of its cached prompts, 64 hexadecimal digits; `sent` is its own, which divides them more."""
        # With their lengths: else a client could move a part of its name into its salt, and name another's.
        parts = (self.name.encode(errors="surrogateescape"), sent.encode())
        data = b"".join(len(one).to_bytes(8, "big") + one for one in parts)
        return hashlib.blake2b(data, key=self.cache_secret, digest_size=32).hexdigest()


ANYBODY: Final = ApiClient("")
"""The one client if no keys are required."""
NO_ANSWERS: Final = Answers()


class UnknownKeyError(RequestError):
    """A key that no client has. Its digest is short: enough to tell attempts apart, and to find one's own mistake."""

    def __init__(self, key: bytes):
        super().__init__("the API key is unknown", status=401, code="invalid_api_key")
        self.key_digest = hashlib.sha256(key).hexdigest()[:KEY_DIGEST_DIGITS]


class Auth:
    """Admits requests with a valid key in `keys`; None admits all, without limits. With keys no client finds what is
    cached of another's prompts, unless they have a `shared_cache`.
    """

    def __init__(
        self, keys: "KeyRing | None" = None, clock: Callable[[], float] = time.monotonic, *, shared_cache: bool = False
    ):
        self.asks = keys is not None
        """Whether it asks for keys."""
        self.isolates = self.asks and not shared_cache
        """Whether each client has a cache of its own."""
        self._keys = keys
        self._meters = Meters(clock)
        self._anybody = Meter(ANYBODY, clock)

    @contextmanager
    def admitted(self, http: web.Request) -> Iterator["Meter"]:
        """Count one request of a client while the block runs.

        Raises RequestError: 401 without a valid key, 429 above a limit.
        """
        meter = self._meters.of(self.client(http)) if self._keys is not None else self._anybody
        with meter.request():
            yield meter

    def client(self, http: web.Request) -> ApiClient:
        if self._keys is None:
            return ANYBODY
        header = http.headers.get("Authorization", "")
        key = header[len(_SCHEME) :] if header[: len(_SCHEME)].lower() == _SCHEME else http.headers.get(_KEY_HEADER)
        if key is None:
            raise RequestError(
                f"this endpoint requires a key: send `Authorization: Bearer KEY` or `{_KEY_HEADER}: KEY`",
                status=401,
                code="missing_api_key",
            )
        # aiohttp decodes headers so: these are the client's own bytes again.
        sent = key.strip().encode(errors="surrogateescape")
        client = self._keys.client(sent)
        if client is None:
            raise UnknownKeyError(sent)
        return client


class Meter:
    """One client's use: requests in flight, requests and tokens a minute, and the lengths of its prompts.

    Both rates are buckets of one minute. A request may overdraw the bucket of tokens, so that a prompt of more than a
    minute's tokens is possible. The bucket then admits no request until it is full again above zero.
    """

    def __init__(self, client: ApiClient, clock: Callable[[], float]):
        self._clock = clock
        self.in_flight = 0
        self.estimator = TokenEstimator()
        self._requests = self._tokens = None
        self.limit(client)

    def limit(self, client: ApiClient) -> None:
        """Set the limits. Each rate keeps the share that was spent; a rate that had no limit starts full."""
        self.client = client
        self._requests = self._bucket(client.requests_per_minute, self._requests)
        self._tokens = self._bucket(client.tokens_per_minute, self._tokens)

    @contextmanager
    def request(self) -> Iterator[None]:
        """Count one request while the block runs; raise LimitError, and count nothing, above a limit."""
        now, client = self._clock(), self.client
        if client.max_in_flight is not None and self.in_flight >= client.max_in_flight:
            raise _limit_reached("requests", f"{client.max_in_flight} requests in flight", 1.0)
        if self._requests and (wait_seconds := self._requests.delay_seconds(1.0, now)):
            raise _limit_reached("requests", f"{client.requests_per_minute} requests a minute", wait_seconds)
        if self._tokens and (wait_seconds := self._tokens.delay_seconds(1.0, now)):
            raise _limit_reached("tokens", f"{client.tokens_per_minute} tokens a minute", wait_seconds)
        if self._requests:
            self._requests.take(1, now)
        self.in_flight += 1
        try:
            yield
        finally:
            self.in_flight -= 1

    @property
    def limits_tokens(self) -> bool:
        return self._tokens is not None

    def most_of(self, tokens: int) -> int:
        """Return how many tokens are charged for a guess: no more than those of a minute."""
        return min(tokens, self.client.tokens_per_minute or tokens)

    def charge(self, tokens: int) -> None:
        """Take tokens of prompts or answers; a negative number gives them back."""
        if self._tokens:
            self._tokens.take(tokens, self._clock())

    def _bucket(self, per_minute: int | None, before: RateBucket | None) -> RateBucket | None:
        now = self._clock()
        if not per_minute:
            return None
        level = before.level(now) if before else per_minute
        share = per_minute * level / (before.depth if before else per_minute)
        # What is left stays the same share. A debt takes no longer than before, and is no greater.
        return RateBucket(per_minute / MINUTE_SECONDS, per_minute, now, max(share, level) if level < 0 else share)


class Charge:
    """What a client is charged for one request: the estimate of its prompt and the most of its answers, but of these no
    more than a minute's tokens, until the exact lengths are known.
    """

    def __init__(self, meter: Meter, size: PromptSize, estimated_tokens: int, answers: Answers = NO_ANSWERS):
        self._meter = meter
        self._size = size
        self._estimated_tokens = estimated_tokens
        self._answers = answers
        self._answer_tokens = meter.most_of(answers.most_tokens)
        self.is_limited = meter.limits_tokens
        """Whether it matters what the answers have."""
        self.exact_tokens = 0
        """Of the prompt; 0: unknown."""
        meter.charge(estimated_tokens + self._answer_tokens)

    def settle(self, exact_tokens: int) -> None:
        """Charge the exact length instead, and learn from it; later calls, and one with 0, change nothing."""
        if self.exact_tokens or exact_tokens <= 0:
            return
        self.exact_tokens = exact_tokens
        self._meter.charge(exact_tokens - self._estimated_tokens)
        self._meter.estimator.observe(self._size, exact_tokens)

    def settle_answers(self, returned_tokens: int) -> None:
        """Charge what the returned answers have instead; those that are computed for them were as long."""
        tokens = self._answers.tokens(returned_tokens)
        self._meter.charge(tokens - self._answer_tokens)
        self._answer_tokens = tokens

    def give_back(self) -> None:
        """Charge nothing after all. Nothing may follow."""
        self._meter.charge(-(self.exact_tokens or self._estimated_tokens) - self._answer_tokens)


class Meters:
    """The meters of all clients. They are bounded by the names of the key files."""

    def __init__(self, clock: Callable[[], float]):
        self._clock = clock
        self._meters: dict[str, Meter] = {}

    def of(self, client: ApiClient) -> Meter:
        """Return a client's meter with the client's present limits."""
        meter = self._meters.get(client.name)
        if meter is None:
            meter = self._meters[client.name] = Meter(client, self._clock)
        elif meter.client != client:
            meter.limit(client)
        return meter


class KeyRing:
    """The keys of a folder, at most a second old.

    Names that begin with a dot are skipped. Raises ConfigError if the folder is unreadable at the start.
    """

    def __init__(self, folder: Path, clock: Callable[[], float] = time.monotonic):
        self._folder = folder
        self._clock = clock
        self._secret = secrets.token_bytes(32)
        self._problems = LogOnce(log)
        self._clients: Mapping[bytes, ApiClient] = {}
        self._stamps: dict[str, Stamp | None] = {}
        self._look_at = 0.0
        try:
            self._read_changed()
        except OSError as error:
            raise ConfigError(f"--keys-dir {folder}: {error.strerror}") from error

    def client(self, key: bytes) -> ApiClient | None:
        """Return the key's client, or None; look for changed files at most once a second."""
        if self._clock() >= self._look_at:
            where = f"--keys-dir {self._folder}"
            try:
                self._read_changed()
                self._problems.worked(where, f"{where} can be read again")
            except OSError as error:
                message = f"{where} cannot be read, the former keys stay in use: {error.strerror}"
                self._problems.failed(where, message, level=logging.ERROR)
        return self._clients.get(self._hidden(hashlib.sha256(key).digest()))

    def _read_changed(self) -> None:
        self._look_at = self._clock() + POLL_SECONDS
        stamps = self._stamps_now()
        if stamps == self._stamps:
            return
        clients: dict[bytes, ApiClient] = {}
        names: dict[str, str] = {}
        for name in stamps:
            try:
                clients |= self._read_client(name, names.setdefault(name.casefold(), name), clients)
            except (OSError, ConfigError) as error:
                reason = error.strerror if isinstance(error, OSError) else error
                message = f"the file {name!r} in --keys-dir admits no client: {reason}"
                self._problems.failed(name, message, level=logging.ERROR)
        self._problems.keep_only(stamps)
        self._clients, self._stamps = clients, stamps
        log.info("%d API keys are in use", len(clients))

    def _read_client(self, name: str, first_name: str, others: Mapping[bytes, ApiClient]) -> dict[bytes, ApiClient]:
        """Return a file's client by its hidden keys; `first_name` has the first file that is named so in any case.

        A key has one owner, whose limits count: those of `others` are left out, and logged.

        Raises OSError. Raises ConfigError also for a file of another one's name, and for one without a key of its own.
        """
        if first_name != name:
            raise ConfigError(f"{first_name!r} is a client of the same name; give it another one")
        found = _read(self._folder / name)
        digests = {self._hidden(digest): digest for digest in (_digest(key.encode()) for key in found.keys)}
        owners = sorted({others[one].name for one in digests.keys() & others.keys()})
        own = [one for one in digests if one not in others]
        if not own:
            raise ConfigError(f"all its keys are of {', '.join(map(repr, owners))}; give each client its own")
        if owners:
            message = f"the file {name!r} in --keys-dir holds keys of {', '.join(map(repr, owners))}, which stay theirs"
            self._problems.failed(name, f"{message}: give each client its own")
        else:
            self._problems.worked(name, f"the file {name!r} in --keys-dir can be used again")
        return dict.fromkeys(own, found.client(name, digests[own[0]]))

    def _stamps_now(self) -> dict[str, Stamp | None]:
        found: dict[str, Stamp | None] = {}
        with os.scandir(self._folder) as entries:
            for entry in entries:
                # A mounted Secret has `..data` and a dated folder beside its files.
                if entry.name.startswith(".") or not _may_be_file(entry):
                    continue
                found[entry.name] = file_stamp(entry)
                if len(found) > MAX_FILES:
                    raise OSError(0, f"it holds more than {MAX_FILES} files")
        return dict(sorted(found.items()))

    def _hidden(self, digest: bytes) -> bytes:
        return hashlib.blake2b(digest, key=self._secret, digest_size=16).digest()


class _KeyFile(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    keys: list[str]
    max_in_flight: Limit | None = None
    requests_per_minute: Limit | None = None
    tokens_per_minute: Limit | None = None

    def client(self, name: str, first_digest: bytes) -> ApiClient:
        secret = hashlib.sha256(_SALTS + first_digest).digest()
        return ApiClient(name, self.max_in_flight, self.requests_per_minute, self.tokens_per_minute, secret)


def _may_be_file(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_file()
    except OSError:  # a link in a circle: a file that cannot be used, and no reason to ignore the others
        return True


def _read(path: Path) -> _KeyFile:
    """Read a key file. Raises OSError, or ConfigError without the file's content."""
    with path.open("rb") as file:
        content = file.read(MAX_FILE_BYTES + 1)
    if len(content) > MAX_FILE_BYTES:
        raise ConfigError(f"it has more than {MAX_FILE_BYTES} bytes")
    if content.lstrip().startswith(b"{"):
        try:
            found = msgspec.json.decode(content, type=_KeyFile)
        except msgspec.ValidationError as error:
            raise ConfigError(f"{error}") from None
        except UNREADABLE:
            # Without its cause, which quotes the file.
            raise ConfigError("it begins like JSON, but is not valid JSON") from None
    else:
        found = _KeyFile([line.strip().decode("ascii", "replace") for line in content.splitlines() if line.strip()])
    if not found.keys:
        raise ConfigError("it holds no key")
    return found


def _digest(key: bytes) -> bytes:
    if key.lower().startswith(b"sha256:"):
        if digest := _DIGEST.fullmatch(key):
            if (found := bytes.fromhex(digest[1].decode())) == _OF_NOTHING:
                raise ConfigError("sha256: is followed by the digest of an empty key; was the variable set?")
            return found
        raise ConfigError("sha256: must be followed by 64 hexadecimal digits, lower case")
    if not _KEY.fullmatch(key):
        raise ConfigError("a key must have 16 to 512 characters, printable ASCII without spaces")
    return hashlib.sha256(key).digest()


def _limit_reached(kind: str, limit: str, wait_seconds: float) -> LimitError:
    return LimitError(
        f"this API key's limit of {limit} is reached; try again in {math.ceil(wait_seconds)} s", kind, wait_seconds
    )
