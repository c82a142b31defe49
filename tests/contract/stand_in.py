"""A stand-in for an engine with our connector: it answers as vLLM does, and its caches are words in a list that all
stand-ins share. It can break each part of the contract, so that each check is seen to fail.

Its streams are those of the gateway's tests, whose form is recorded from a real vLLM. A whole answer is one
put together.
"""

import hashlib
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from os.path import commonprefix
from typing import Any

from prfaas.cli.contract.calls import put_together
from prfaas.errors import RequestError

from ..unit.gateway.vllm_standin import Vllm

CONTEXT, PAGE, DATA_PORT = 4096, 16, 8001
LOOK_SECONDS = 2.0
"""For so long a destination looks for a cache of which no source has said anything."""
LEASE_SECONDS = 0.3
RIGHTS = ("transfer_id", "epoch", "token", "port")


class StandIn(Vllm, ThreadingHTTPServer):
    """One engine; `broken` names what it does wrongly. `offers` are the caches that all sources give."""

    daemon_threads = True

    def __init__(self, offers: list[dict[str, Any]], broken: str = ""):
        Vllm.__init__(self)
        ThreadingHTTPServer.__init__(self, ("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.offers, self.broken, self._lock = offers, broken, threading.Lock()
        self.running: set[Handler] = set()
        self._cached: set[tuple[str, bytes]] = set()

    def tokens_behind(self, ids: list[int], limit: int) -> list[int]:
        """Return letters, each of which depends on all before it."""
        found: list[int] = []
        while len(found) < limit:
            seed = bytes([len(ids) % 256, *found]) if self.broken == "forgets" else bytes([*ids, *found])
            found.append(ord("a") + hashlib.sha256(seed).digest()[0] % 26)
        return found

    def metrics(self) -> str:
        held = [
            one
            for one in self.offers
            if one["source"] == self.url and not one["is_over"] and time.monotonic() - one["offered"] < LEASE_SECONDS
        ]
        return f"vllm:num_requests_running {len(self.running) + len(held)}\n"

    def answer(self, path: str, fields: dict[str, Any]) -> bytes:
        """Return a stream, or a whole answer. Raises RequestError for what is wrong."""
        prompt = fields.get("prompt", "Say it: ")
        ids = bytes(prompt.encode() if isinstance(prompt, str) else prompt)
        if fields["model"] != "m" and self.broken != "any model":
            raise RequestError("no such model", status=404)
        if fields["max_tokens"] < 0 or fields["temperature"] < 0 or len(ids) > CONTEXT:
            raise RequestError("" if self.broken == "no words" else "this is wrong")
        leg, salt = (fields.get("kv_transfer_params") or {}).get("prfaas") or {}, fields.get("cache_salt", "")
        salt = "" if self.broken == "any salt" else salt
        known = [one for each, one in self._cached if each == salt]
        cached = max((len(commonprefix([ids[:-1], one])) for one in known), default=0)  # noqa: RUF071  # of bytes
        cached, fetched = cached // PAGE * PAGE, 0
        if leg.get("role") == "source":
            self._offer(leg, ids)
        elif leg:
            fetched = self._fetch(leg, ids, cached)
        self._cached.add((salt, ids))
        stream = b"".join(b"data: %b\n\n" % event.encode() for event in self.events(path, fields))
        if fields.get("stream"):
            return stream
        body = put_together(stream)
        (choice,), new = body["choices"], self.tokens_behind(list(ids), fields["max_tokens"])
        if self.broken == "stops":
            choice["finish_reason"] = "stop"
        if self.broken == "loses an id":
            del choice["token_ids"][:1]
        counts = [(1 if fetched and self.broken == "own usage" else len(ids)), len(new) + (self.broken == "miscounts")]
        usage = dict(zip(("prompt_tokens", "completion_tokens", "total_tokens"), (*counts, sum(counts)), strict=True))
        details = None if self.broken == "silent" else {"cached_tokens": max(cached, fetched)}
        if fields.get("logprobs"):
            choice["logprobs"] = scores(new, 3.0 if fetched and self.broken == "stale state" else 0.0)
        return json.dumps(body | {"usage": usage | {"prompt_tokens_details": details}}).encode()

    def _offer(self, leg: dict[str, Any], ids: bytes) -> None:
        if any(one["transfer_id"] == leg["transfer_id"] for one in self.offers):
            raise RequestError("it is open", status=500 if self.broken == "twice" else 409)
        if self.broken != "gives nothing":
            kept = {"source": self.url, "offered": time.monotonic(), "ids": ids[: leg["tokens"] or -1]}
            self.offers.append(leg | kept | {"port": DATA_PORT, "is_over": False})

    def _fetch(self, leg: dict[str, Any], ids: bytes, cached: int) -> int:
        """Return how many tokens come. A source that gives another prompt's is done with it, too."""
        rights = [name for name in RIGHTS if self.broken != f"any {name}"]
        for _ in range(int(LOOK_SECONDS / 0.005)):
            with self._lock:
                for offer in self.offers:
                    if not offer["is_over"] and all(offer[name] == leg[name] for name in rights):
                        if cached and self.broken == "never declines":
                            return 0
                        offer["is_over"] = True
                        is_same = ids.startswith(offer["ids"]) or self.broken == "any prompt"
                        return len(offer["ids"]) if is_same and len(offer["ids"]) > cached else 0
                if any(offer["transfer_id"] == leg["transfer_id"] for offer in self.offers):
                    break  # it is over, or another's
            time.sleep(0.005)
        if self.broken == "needs its source":
            raise RequestError("the cache did not come", status=502)
        return 0


def scores(new: list[int], off: float) -> dict[str, Any]:
    tokens, values = [chr(token) for token in new], [-off] * len(new)
    tops = [{token: value} for token, value in zip(tokens, values, strict=True)]
    return {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops}


class Handler(BaseHTTPRequestHandler):
    server: StandIn

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        card = {"id": "m", "max_model_len": CONTEXT, "owned_by": "vllm"}
        is_card = self.path == "/v1/models"
        self._answer(200, json.dumps({"data": [card]}).encode() if is_card else self.server.metrics().encode())

    def do_POST(self) -> None:
        self.server.running.add(self)
        with suppress(OSError, json.JSONDecodeError):  # its caller left, perhaps in the middle of the body
            fields = json.loads(self.rfile.read(int(self.headers["content-length"])))
            try:
                self._answer(200, self.server.answer(self.path, fields))
            except RequestError as error:
                self._answer(error.status, json.dumps({"error": {"message": str(error)}}).encode())
        if self.server.broken != "leaks":
            self.server.running.remove(self)

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@contextmanager
def stand_ins(*broken: str) -> Iterator[list[StandIn]]:
    """Run a stand-in for each of these ways to break the contract; none for an empty word."""
    offers: list[dict[str, Any]] = []
    servers = [StandIn(offers, each) for each in broken]
    for one in servers:
        threading.Thread(target=one.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield servers
    finally:
        for server in servers:
            server.shutdown()
            server.server_close()
