"""An engine under check, as a gateway calls it: completions and chats, whole and streamed, each one that its caller may
leave. A stream is put together, so every answer has the form of a whole one of vLLM.
"""

import http.client
import re
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple, cast

import msgspec

from prfaas.cli.measured_server import COMPLETIONS, HttpServer
from prfaas.errors import PeerError, ProtocolError, UnreachableError
from prfaas.measure.answers import LOADS, StreamedAnswer, samples_of
from prfaas.util import decode_json
from prfaas.wire import headers

NOT_IDLE_SECONDS: Final = 70.0
"""Less than a lease, which ends after two minutes: what is held for longer was not given back. And more than half of
one: a check that failed waits twice."""
_MOST_BYTES: Final = 64 << 20
_POLL_SECONDS: Final = 0.05
_HELD: Final = LOADS | {"vllm:kv_cache_usage_perc", "prfaas_cache_used_pages"}
"""Gauges that are zero where nothing is held for any request."""
_BLOCK: Final = re.compile(r'^vllm:cache_config_info\{[^}]*\bblock_size="(\d{1,6})"', re.MULTILINE)


class CheckedAnswer(NamedTuple):
    """What an engine answered."""

    status: int
    headers: Mapping[str, str]
    body: dict[str, Any]

    @property
    def choice(self) -> dict[str, Any]:
        """The only choice. Raises ProtocolError for any other answer."""
        choices: list[dict[str, Any]] = self.body.get("choices") or []
        if self.status != 200 or self.body.get("error") or len(choices) != 1:
            raise ProtocolError(f"a request for one choice is answered by HTTP {self.status}: {str(self.body)[:300]}")
        return choices[0]

    @property
    def ids(self) -> tuple[list[int], list[int]]:
        """Token ids of prompt and answer; empty if it gives none."""
        prompt_ids = self.choice.get("prompt_token_ids") or self.body.get("prompt_token_ids")
        return prompt_ids or [], self.choice.get("token_ids") or []

    @property
    def scores(self) -> dict[str, Any]:
        """Its log probabilities. Raises PeerError if it has none."""
        scores: dict[str, Any] = self.choice.get("logprobs") or {}
        require(scores.get("tokens"), "a completion with logprobs is answered without them")
        return scores

    @property
    def usage(self) -> dict[str, Any]:
        return self.body.get("usage") or {}

    @property
    def cached_tokens(self) -> int:
        """Tokens of the prompt that were not computed for this request."""
        details = self.usage.get("prompt_tokens_details")
        require(details, "usage has no prompt_tokens_details: start vLLM with --enable-prompt-tokens-details")
        return cast("dict[str, Any]", details).get("cached_tokens") or 0

    @property
    def has_fetched(self) -> bool:
        """Whether a cache came from elsewhere, for a prompt that nobody sent before. Our worker says its bytes, since
        what was computed elsewhere for this request counts as computed."""
        found = self.headers.get(headers.KV_BYTES)
        return self.cached_tokens > 0 if found is None else int(found) > 0


class Running:
    """A request on its way, which its caller may leave."""

    def __init__(self, server: HttpServer, path: str, body: bytes):
        self._server, self._future = server, Future[CheckedAnswer]()
        self.answer, self.is_answered = self._future.result, self._future.done
        threading.Thread(target=self._run, args=(path, body), daemon=True).start()

    def _run(self, path: str, body: bytes) -> None:
        try:
            self._future.set_result(self._server.post(path, body, _read))
        except Exception as error:
            self._future.set_exception(error)

    @property
    def is_refused(self) -> bool:
        """Whether it was answered, by an error."""
        return self.is_answered() and self._future.exception() is None and self.answer().status != 200

    def leave(self) -> None:
        """Close the connection, as a gateway that dies does; the answer may have come before."""
        while not self.is_answered():
            self._server.close()
            wait([self._future], _POLL_SECONDS)


class CheckedEngine:
    """An engine at a URL. Raises UnreachableError or ProtocolError if it does not say which model it serves."""

    def __init__(
        self, url: str, ca: Path | None = None, key: str | None = None, tls_dir: Path | None = None, flag: str = "--url"
    ):
        self._open = partial(HttpServer, url, ca, key, flag=flag, tls_dir=tls_dir)
        self._server = self._open()
        self._card = self._server.card()
        self.url, self.context_tokens = self._server.url, self._card.max_model_len or 1 << 20
        self.model, self.owned_by = self._card.id, self._card.owned_by

    def begin(self, **fields: Any) -> Running:
        """Send a greedy completion, or a chat if it has messages, and return at once."""
        whole = {"model": self._card.id, "max_tokens": 8, "temperature": 0, "ignore_eos": True} | fields
        if fields.get("stream"):
            whole["stream_options"] = {"include_usage": True}
        path = "/v1/chat/completions" if "messages" in fields else COMPLETIONS
        return Running(self._open(), path, msgspec.json.encode(whole))

    def ask(self, **fields: Any) -> CheckedAnswer:
        """Send one, and wait for its answer, whatever its status. Raises UnreachableError if it breaks off."""
        return self.begin(**fields).answer()

    def label(self) -> str:
        """Return what serves, with the version that it says."""
        return self._server.label(self._card)

    def get(self, path: str) -> bytes:
        """Return the answer to a GET. Raises PeerError for any but 200."""
        return self._server.get(path)

    def stream(self, prompt: list[int], tokens: int) -> StreamedAnswer:
        """Stream an answer of so many tokens, and return when each came."""
        return self._server.ask([prompt], tokens)[0]

    def block_tokens(self) -> int | None:
        """Return the tokens of a block of its cache; None if it does not say."""
        sizes = _BLOCK.findall(self._read_metrics())
        return max((int(one) for one in sizes), default=None)

    def metrics(self) -> dict[str, float]:
        """Return the sum of each metric's samples."""
        found = dict[str, float]()
        for name, _, value in samples_of(self._read_metrics()):
            found[name] = found.get(name, 0.0) + value
        return found

    def _read_metrics(self) -> str:
        """Return its metrics; nothing if it shows none, as SGLang without --enable-metrics."""
        try:
            return self._server.get("/metrics").decode(errors="replace")
        except UnreachableError:
            raise
        except PeerError:
            return ""

    def held(self) -> dict[str, float]:
        """Return what is held for requests, by metric. Raises PeerError if the engine does not say."""
        metrics = self.metrics()
        found = _HELD & metrics.keys()
        require(found, f"{self.url}/metrics has none of the gauges of vLLM or our worker")
        return {name: metrics[name] for name in found if metrics[name]}

    def wait(self, is_so: Callable[[], object], words: str) -> None:
        """Wait until something is so. Raises PeerError if it never is."""
        deadline = time.monotonic() + NOT_IDLE_SECONDS
        while not is_so():
            if time.monotonic() > deadline:
                raise PeerError(f"{self.url} {words}: it holds {self.held()}")
            time.sleep(_POLL_SECONDS)

    def wait_busy(self, running: Running) -> None:
        self.wait(lambda: running.is_answered() or self.held(), "never begins a request")

    def wait_idle(self) -> None:
        self.wait(lambda: not self.held(), "is not idle again")


def require(holds: object, words: str) -> None:
    """Raise PeerError with these words unless something holds."""
    if not holds:
        raise PeerError(words)


def _read(answer: http.client.HTTPResponse, _began_seconds: float) -> CheckedAnswer:
    content = answer.read(_MOST_BYTES)
    if answer.read(1):
        raise ProtocolError(f"an answer is longer than {_MOST_BYTES >> 20} MiB")
    is_stream = content.startswith(b"data:")
    words = f"an answer by HTTP {answer.status} is no JSON object ({content[:60]!r})"
    body = put_together(content) if is_stream else decode_json(content, dict[str, Any], words)
    return CheckedAnswer(answer.status, {name.lower(): value for name, value in answer.getheaders()}, body)


def put_together(stream: bytes) -> dict[str, Any]:
    """Return a stream of one choice in the form of a whole answer. Raises ProtocolError if it has no end."""
    *events, end = (line[5:].strip() for line in stream.splitlines() if line.startswith(b"data:"))
    if end != b"[DONE]":
        raise ProtocolError(f"a stream ends without [DONE]: {stream[-100:]!r}")
    choice: dict[str, Any] = {"text": "", "token_ids": []}
    body: dict[str, Any] = {"choices": [choice]}
    for event in (decode_json(line, dict[str, Any], "an event of a stream is no JSON object") for line in events):
        body |= {name: event[name] for name in ("error", "usage", "prompt_token_ids") if event.get(name)}
        for piece in event.get("choices") or ():
            said: dict[str, Any] = piece.get("delta") or piece
            choice["text"] += said.get("text") or said.get("content") or ""
            choice["token_ids"] += piece.get("token_ids") or []
            choice |= {name: piece[name] for name in ("finish_reason", "prompt_token_ids") if piece.get(name)}
    return body
