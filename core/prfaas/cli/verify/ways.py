"""The ways in which engines hand a request over, as a gateway calls them: with our mover, NixlConnector,
MooncakeConnector, SGLang, or behind a gateway that does it itself.

Each returns the leg of the source, where there is one of its own, and the leg that answers. `find_way` tries what the
engines may be, and takes the first by which a cache really crosses.
"""

import re
import secrets
import time
import uuid
from abc import ABC, abstractmethod
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit

import msgspec
from msgspec.structs import replace

from prfaas.cli.contract.calls import CheckedAnswer, CheckedEngine, Running, require
from prfaas.cli.contract.checks import SCORED, EnginePair
from prfaas.cli.measured_server import HttpServer
from prfaas.cli.verify.prompts import DrawnPrompt
from prfaas.errors import ConfigError, PeerError, ProtocolError
from prfaas.names import BOOTSTRAP_PORT
from prfaas.util import decode_json
from prfaas.wire import headers

_DISAGGREGATION: Final = re.compile(rb'"disaggregation_mode"\s*:\s*"(\w+)"')
_EXTERNAL_TOKENS: Final = "vllm:external_prefix_cache_hits_total"
_COUNTED_SECONDS: Final = 2.0
_POLL_SECONDS: Final = 0.05
_ROOM_BITS: Final = 63


class DoubtError(PeerError):
    """What was seen proves too little: neither that a claim holds, nor that it does not."""


class LeftOutError(PeerError):
    """A step does not apply to these engines."""


class Handed(NamedTuple):
    """A request that two engines serve: the source's leg, None if a gateway or an earlier call made it, and the one
    that answers."""

    given: Running | None
    answered: Running


class Way(ABC):
    """One way to hand requests over, from `prefill` to `decode`."""

    name: str

    def __init__(self, prefill: CheckedEngine, decode: CheckedEngine):
        self.prefill, self.decode = prefill, decode

    @abstractmethod
    def begin(self, prompt: DrawnPrompt, **fields: Any) -> Handed:
        """Send a request that is handed over, and return at once, or once its prefill is answered."""

    def hand_off(self, prompt: DrawnPrompt, **fields: Any) -> CheckedAnswer:
        """Hand a request over, and return the answer. Raises PeerError unless its cache crossed."""
        before = self.fetched_tokens()
        given, answered = self.begin(prompt, **{**SCORED, **fields})
        answer = answered.answer()
        if given is not None:
            status = given.answer().status
            require(status == 200, f"the source answers by HTTP {status}: {str(given.answer().body)[:200]}")
        require(answer.choice, "there is no choice")
        require(self._has_crossed(answer, before), "no cache crossed: the prompt was computed where it is answered")
        return answer

    def fetched_tokens(self) -> float | None:
        """Return the tokens that the destination had from elsewhere so far, as vLLM counts them."""
        return self.decode.metrics().get(_EXTERNAL_TOKENS)

    def _has_crossed(self, answer: CheckedAnswer, before: float | None, /) -> bool:
        if (found := answer.headers.get(headers.KV_BYTES)) is not None:
            return int(found) > 0
        if before is None:
            if not answer.usage.get("prompt_tokens_details"):
                raise DoubtError("nothing says whether a cache crossed: neither the engine's metrics nor the usage")
            return answer.has_fetched
        deadline = time.monotonic() + _COUNTED_SECONDS
        while (self.fetched_tokens() or 0.0) <= before:  # vLLM counts what an answer fetched a little later
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_SECONDS)
        return True


class MoverWay(Way):
    """Both legs at once, under one transfer: our worker, and vLLM with our connector."""

    name = "prfaas"

    def __init__(self, pair: EnginePair):
        super().__init__(pair.source, pair.destination)
        self.pair = pair

    def begin(self, prompt: DrawnPrompt, **fields: Any) -> Handed:
        return Handed(*self.pair.hand_off(prompt, **fields))

    def begin_through(self, port: int, host: str, prompt: DrawnPrompt) -> Handed:
        """Hand over by a relay, at this address."""
        named = replace(self.pair.name_transfer(), host=host, port=port)
        return Handed(*self.pair.hand_off(prompt, named))


class NixlWay(Way):
    """The prefill first, whose answer says where the cache lies; then the decode instance pulls it."""

    name = "NixlConnector"

    def begin(self, prompt: DrawnPrompt, **fields: Any) -> Handed:
        return Handed(None, self.begin_pull(prompt, prompt, **fields))

    def begin_pull(self, prefilled: DrawnPrompt, prompt: DrawnPrompt, **fields: Any) -> Running:
        """Prefill one prompt, and have another one answered from its cache."""
        asks = {"do_remote_decode": True, "do_remote_prefill": False}
        place = {f"remote_{name}": None for name in ("engine_id", "block_ids", "host", "port")}
        given = self.prefill.ask(prompt=prefilled, max_tokens=1, kv_transfer_params=asks | place)
        require(given.choice, "the prefill has no choice")
        params: dict[str, Any] = given.body.get("kv_transfer_params") or {}
        require(params.get("remote_engine_id"), "the prefill says no place of its cache")
        return self.decode.begin(prompt=prompt, kv_transfer_params=params, **fields)


class _Rank(msgspec.Struct):
    engine_id: str


class MooncakeWay(Way):
    """Both legs at once; the destination asks the source's bootstrap server."""

    name = "MooncakeConnector"

    def begin(self, prompt: DrawnPrompt, **fields: Any) -> Handed:
        host = urlsplit(self.prefill.url).hostname
        url = f"http://{host}:{BOOTSTRAP_PORT}"
        ranks = decode_json(HttpServer(url).get("/query"), dict[str, _Rank], f"{url}/query answers something else")
        require(ranks, f"{url}/query knows no engine")
        named = {"transfer_id": f"xfer-{uuid.uuid4()}"}
        giving = named | {"do_remote_decode": True, "do_remote_prefill": False}
        where = {"remote_bootstrap_addr": url, "remote_engine_id": next(iter(ranks.values())).engine_id}
        taking = named | where | {"do_remote_decode": False, "do_remote_prefill": True}
        given = self.prefill.begin(prompt=prompt, max_tokens=1, kv_transfer_params=giving)
        return Handed(given, self.decode.begin(prompt=prompt, kv_transfer_params=taking, **fields))


class SglangWay(Way):
    """The same request to both at once, with a room in which they meet. A decode instance computes no prompt itself,
    so what it answers has crossed. Raises PeerError if the engines are none of such a pair."""

    name = "SGLang"

    def __init__(self, prefill: CheckedEngine, decode: CheckedEngine):
        super().__init__(prefill, decode)
        for mode, engine in (("prefill", prefill), ("decode", decode)):
            found = _DISAGGREGATION.search(engine.get("/get_server_info"))
            said = found[1].decode() if found else "not said"
            require(said == mode, f"{engine.url} must have --disaggregation-mode {mode}; its mode is {said}")

    def begin(self, prompt: DrawnPrompt, **fields: Any) -> Handed:
        host, room = urlsplit(self.prefill.url).hostname, secrets.randbits(_ROOM_BITS)
        meeting = {"bootstrap_host": host, "bootstrap_port": BOOTSTRAP_PORT, "bootstrap_room": room}
        given = self.prefill.begin(prompt=prompt, **meeting, **fields)
        return Handed(given, self.decode.begin(prompt=prompt, **meeting, **fields))

    def _has_crossed(self, answer: CheckedAnswer, _before: float | None, /) -> bool:
        return answer.status == 200


class GatewayWay(Way):
    """A gateway that hands over by itself."""

    name = "gateway"

    def __init__(self, gateway: CheckedEngine, prefill: CheckedEngine, decode: CheckedEngine):
        super().__init__(prefill, decode)
        self.gateway = gateway

    def begin(self, prompt: DrawnPrompt, **fields: Any) -> Handed:
        return Handed(None, self.gateway.begin(prompt=prompt, **fields))

    def _has_crossed(self, answer: CheckedAnswer, before: float | None, /) -> bool:
        """Raises PeerError if our gateway says that it had the prompt prefilled where it is decoded."""
        threshold = answer.headers.get(headers.THRESHOLD_TOKENS)
        if has_crossed := super()._has_crossed(answer, before):
            return has_crossed
        require(threshold is None, f"the gateway's threshold is {threshold} tokens: no cache crossed; set a lower one")
        return False


def answers_alone(engine: CheckedEngine) -> bool:
    """Return whether an instance of a pair answers without the other. SGLang's do not."""
    return engine.owned_by != "sglang"


def find_way(pair: EnginePair, prompt: DrawnPrompt) -> Way:
    """Return the way by which the engines hand over. Raises PeerError if no cache crosses by any."""
    source, destination = pair.source, pair.destination
    if not answers_alone(source):
        return SglangWay(source, destination)
    ways: tuple[Way, ...] = (MoverWay(pair),)
    if source.owned_by == "vllm":
        ways += NixlWay(source, destination), MooncakeWay(source, destination)
    failures: list[str] = []
    for way in ways:
        try:
            way.hand_off(prompt, cache_salt=secrets.token_hex(4))
        except ConfigError:
            raise
        except (PeerError, ProtocolError) as error:
            failures.append(f"{way.name}: {error}")
        else:
            return way
    place = f"{pair.data_host or urlsplit(source.url).hostname}:{pair.data_port}"
    raise PeerError(
        f"no cache crosses from {source.url} to {destination.url} ({'; '.join(failures)}). With our mover both must "
        f"have the same weights, and the destination must reach {place}; name it by --data-host and --data-port"
    )
