"""A running server over HTTP, for `prfaas profile measure` and `prfaas contract`: each prompt on its own connection.

Time runs from the first byte of a request on an open connection to each token's arrival. So what HTTP and the network
cost counts, once a request. Whatever interrupts the caller, `close` ends all that is under way: the server then hears
that nobody waits.
"""

import http.client
import socket
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import Final, Self, TypeVar
from urllib.parse import urlsplit

import msgspec

from prfaas import identity
from prfaas.credentials import utc_now
from prfaas.errors import UNREADABLE, ConfigError, PeerError, ProtocolError, RequestError, UnreachableError
from prfaas.measure.answers import WANTED, ServedCard, StreamedAnswer, TokenStream, read_card, read_loads
from prfaas.measure.beside import BEGUN_TOKENS
from prfaas.names import TLS_CERT, TLS_KEY, TLS_TRUSTED
from prfaas.wire import headers

T = TypeVar("T")

KEY_VARIABLE: Final = "PRFAAS_API_KEY"
CONNECT_SECONDS: Final = 10.0
ANSWER_SECONDS: Final = 300.0
"""A server that sends nothing for so long is given up: the first prompt of a length may compile for minutes."""
COMPLETIONS: Final = "/v1/completions"
_DOCUMENT_BYTES: Final = 16 << 20
_PIECE_BYTES: Final = 1 << 16
_LOOKS: Final = 3
_LOOK_SECONDS: Final = 0.1
_NAMES_NO_HOST: Final = frozenset({62, 64})  # OpenSSL: mismatch of the host, of the IP address


class HttpServer:
    """A server at a URL. `ca` is a file with the authority of its certificate, `key` what it may ask for, and `tls_dir`
    a directory with a certificate to show it and its authority."""

    def __init__(
        self, url: str, ca: Path | None = None, key: str | None = None, flag: str = "--url", tls_dir: Path | None = None
    ) -> None:
        self.url = url.rstrip("/").removesuffix("/v1").rstrip("/")
        try:
            self._parts = urlsplit(self.url)
            is_address = self._parts.scheme in {"http", "https"} and bool(self._parts.hostname)
            is_address = is_address and self._parts.port != 0 and self.url.isprintable()
        except ValueError:  # a port that is no number, half an IPv6 address
            is_address = False
        if not is_address or "@" in self._parts.netloc or self._parts.query or self._parts.fragment:
            raise ConfigError(f"{flag} is {url.rpartition('@')[2]!r}; give one such as http://10.0.0.5:8000")
        if key is not None and not (key.isascii() and key.isprintable()):
            raise ConfigError(f"{KEY_VARIABLE} must be printable ASCII; is there a line break at its end?")
        self._headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {key}"} if key else {})
        self._tls = tls_context(ca, tls_dir) if self._parts.scheme == "https" else None
        self._model = ""
        self._open: set[socket.socket] = set()
        self._closes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End every request that is under way, and those of an `ask` that still connect."""
        self._closes += 1  # first: whoever adds a socket after the look below sees it
        for one in list(self._open):
            with suppress(OSError):  # closed already
                one.shutdown(socket.SHUT_RDWR)

    def card(self) -> ServedCard:
        """Return the model that is served; further calls ask for it."""
        card = read_card(self.get("/v1/models"), self.url)
        self._model = card.id
        return card

    def label(self, card: ServedCard) -> str:
        """Return what serves, with its version where it says one."""
        for path in ("/version", "/get_server_info"):
            with suppress(PeerError, ConfigError, *UNREADABLE):
                version = str(msgspec.json.decode(self.get(path), type=dict[str, object]).get("version") or "")
                return f"{card.owned_by} {version if version.isprintable() else ''}".strip()
        return card.owned_by

    def others(self) -> int | None:
        """Return how many requests run or wait while none of ours does; None if the server does not say."""
        others = None
        for _ in range(_LOOKS):  # the end of ours may not be counted yet
            try:
                others = read_loads(self.get("/metrics").decode(errors="replace"))
            except (PeerError, ConfigError):
                return None
            if not others:
                break
            time.sleep(_LOOK_SECONDS)
        return others

    def get(self, path: str) -> bytes:
        """Return the answer to a GET. Raises UnreachableError for none, ConfigError for a missing key."""
        with closing(self._connect()) as connection:
            try:
                connection.request("GET", self._parts.path + path, headers=self._headers)
                with connection.getresponse() as answer:
                    content = answer.read(_DOCUMENT_BYTES)
            except (OSError, http.client.HTTPException) as error:
                raise UnreachableError(f"{self.url}{path} does not answer: {error or type(error).__name__}") from error
        if answer.status != 200:
            raise self._refusal(path, answer.status, content)
        return content

    def ask(self, prompts: Sequence[list[int]], answer_tokens: int) -> list[StreamedAnswer]:
        """Send prompts of token ids at once, and wait for their answers."""
        bodies = [self._body(prompt, answer_tokens) for prompt in prompts]
        with ThreadPoolExecutor(len(bodies)) as pool:
            try:
                return list(pool.map(partial(self._stream, self._closes), bodies))
            except BaseException:
                self.close()  # the pool waits for its threads
                raise

    def ask_beside(
        self, streams: Sequence[list[int]], answer_tokens: int, prompt: list[int]
    ) -> tuple[list[StreamedAnswer], StreamedAnswer]:
        """Send the prompts of `streams` at once, and `prompt`, for one token, when each has had BEGUN_TOKENS of its
        answer, or all of it. Wait for all answers."""
        bodies, begun = [self._body(one, answer_tokens) for one in streams], [threading.Event() for _ in streams]
        stream = partial(self._stream, self._closes)
        with ThreadPoolExecutor(len(bodies)) as pool:
            try:
                running = [pool.submit(stream, *each) for each in zip(bodies, begun, strict=True)]
                for event in begun:
                    event.wait(ANSWER_SECONDS)
                lone = stream(self._body(prompt, 1))
                return [one.result() for one in running], lone
            except BaseException:
                self.close()  # the pool waits for its threads
                raise

    def _body(self, prompt: list[int], answer_tokens: int) -> bytes:
        return msgspec.json.encode(
            {
                "model": self._model,
                "prompt": prompt,
                "max_tokens": answer_tokens,
                "min_tokens": answer_tokens,
                "ignore_eos": True,
                "temperature": 0,
                "stream": True,
                "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            }
        )

    def _stream(self, closes: int, body: bytes, begun: threading.Event | None = None) -> StreamedAnswer:
        """Return the answer; `begun` is set when it has had BEGUN_TOKENS, or ends in whatever way. `closes` is of the
        caller's beginning."""
        begun = begun or threading.Event()
        try:
            return self.post(COMPLETIONS, body, partial(self._read, begun), closes)
        finally:
            begun.set()

    def post(
        self, path: str, body: bytes, read: Callable[[http.client.HTTPResponse, float], T], closes: int | None = None
    ) -> T:
        """Return what `read` makes of the answer to a POST, and of the time when its first byte was sent. Raises
        UnreachableError for none, for one that breaks off, and where `close` was called after `closes` times."""
        with closing(self._connect()) as connection:
            sock = connection.sock  # the connection forgets it where an answer ends with it
            self._open.add(sock)
            try:
                if closes not in (None, self._closes):
                    raise UnreachableError(f"{self.url}: the request was given up before it was sent")
                began_seconds = time.perf_counter()
                connection.request("POST", self._parts.path + path, body, self._headers)
                with connection.getresponse() as answer:
                    return read(answer, began_seconds)
            except TimeoutError as error:
                raise UnreachableError(
                    f"{self.url} sent nothing of an answer for {ANSWER_SECONDS:g} s; look into the server's log"
                ) from error
            except (OSError, http.client.HTTPException) as error:
                raise UnreachableError(f"{self.url} broke off an answer: {error or type(error).__name__}") from error
            finally:
                self._open.discard(sock)

    def _read(self, begun: threading.Event, answer: http.client.HTTPResponse, began_seconds: float) -> StreamedAnswer:
        stream = TokenStream(self.url, began_seconds)
        if answer.status != 200:
            raise self._refusal(COMPLETIONS, answer.status, answer.read(_PIECE_BYTES))
        if answer.headers.get(headers.DECISION):
            raise ConfigError(f"{self.url} is a gateway, which chooses among instances; {WANTED}")
        while not stream.is_done and (piece := answer.read1(_PIECE_BYTES)):
            stream.feed(piece, time.perf_counter())
            if stream.tokens >= BEGUN_TOKENS:
                begun.set()
        return stream.end()

    def _connect(self) -> http.client.HTTPConnection:
        try:
            connection = self._connected()
        except ssl.SSLCertVerificationError as error:
            if self._tls is None or not self._tls.check_hostname or error.verify_code not in _NAMES_NO_HOST:
                raise UnreachableError(
                    f"{self.url} shows a certificate that proves nothing here ({error.verify_message}); "
                    "give --ca with the file of its authority"
                ) from error
            self._tls.check_hostname = False  # an instance's certificate names its cluster
            return self._connect()
        except (OSError, http.client.HTTPException, UnicodeError) as error:
            raise UnreachableError(f"{self.url} does not answer: {error or type(error).__name__}") from error
        return connection

    def _connected(self) -> http.client.HTTPConnection:
        host, port = self._parts.hostname or "", self._parts.port
        if self._tls is None:
            connection = http.client.HTTPConnection(host, port, timeout=CONNECT_SECONDS)
        else:
            connection = http.client.HTTPSConnection(host, port, timeout=CONNECT_SECONDS, context=self._tls)
        try:
            connection.connect()
            if isinstance(connection.sock, ssl.SSLSocket) and not connection.sock.context.check_hostname:
                identity.check_peer(connection.sock.getpeercert(True) or b"", None, utc_now(), identity.PeerRules())
        except BaseException:
            connection.close()
            raise
        connection.sock.settimeout(ANSWER_SECONDS)
        return connection

    def _refusal(self, path: str, status: int, content: bytes) -> PeerError | ConfigError | RequestError:
        text = content[:300].decode(errors="replace")
        if headers.CODE_NO_CERTIFICATE in text or headers.CODE_NOT_ALLOWED in text:
            return ConfigError(f"{self.url} refuses the caller: {text}; give --tls-dir with the hub's certificate")
        if status in {401, 403}:
            return ConfigError(f"{self.url}{path} wants a key: put it into the environment variable {KEY_VARIABLE}")
        if path == COMPLETIONS:
            return RequestError(f"{self.url} refuses a prompt, HTTP {status}: {text}", status=status)
        return ProtocolError(f"{self.url}{path} answers HTTP {status}: {text}; {WANTED}")


def tls_context(ca: Path | None, tls_dir: Path | None) -> ssl.SSLContext:
    """Return what a client believes and shows. Raises ConfigError for files that are none."""
    try:
        context = ssl.create_default_context(cafile=ca)
    except OSError as error:  # ssl.SSLError is one
        raise ConfigError(f"--ca {ca} holds no certificate of an authority: {error}") from error
    if tls_dir is not None:
        try:
            context.load_verify_locations(tls_dir / TLS_TRUSTED)
            context.load_cert_chain(tls_dir / TLS_CERT, tls_dir / TLS_KEY)
        except OSError as error:
            names = f"{TLS_CERT}, {TLS_KEY} and {TLS_TRUSTED}"
            raise ConfigError(f"--tls-dir {tls_dir} must have {names} of a cluster: {error}") from error
    return context
