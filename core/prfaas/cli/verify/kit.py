"""What a step of a verification works with: the engines, the way between them, prompts, and what counts as equal."""

import secrets
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec

from prfaas.cli.contract.calls import CheckedAnswer, CheckedEngine, require
from prfaas.cli.contract.checks import SCORED
from prfaas.cli.verify.prompts import DrawnPrompt, Prompts
from prfaas.cli.verify.relay import Harm, Relay, address_towards
from prfaas.cli.verify.ways import DoubtError, LeftOutError, MoverWay, Way
from prfaas.errors import PeerError
from prfaas.measure.scores import NOISE_NATS, difference

LONG_TOKENS: Final = 64


class VerifyFigures(msgspec.Struct, omit_defaults=True):
    """What a verification measured. A cache comes as fast as the link and the prefill let it. A stall is the longest
    time between two tokens of another answer."""

    noise_nats: float | None = None
    limit_nats: float | None = None
    cache_mbps: float | None = None
    first_byte_seconds: float | None = None
    prompt_tokens: int | None = None
    handed_seconds: float | None = None
    alone_seconds: float | None = None
    stall_alone_seconds: float | None = None
    stall_beside_seconds: float | None = None


@dataclass
class Kit:
    """What all steps share.

    Args:
        reference: answers alone.
        block_tokens: tokens of a block of the destination's cache.
        most_tokens: those of the longest prompt.
        direct: the way with our mover, if the engines have it, whatever stands before them.
        prefill_answers: whether the engine that prefills answers alone, too.
        labels: what engines said of themselves, by URL.
        limit_nats: up to here, answers count as equal.
    """

    way: Way
    reference: CheckedEngine
    prompts: Prompts
    block_tokens: int
    most_tokens: int
    tls_dir: Path | None = None
    direct: MoverWay | None = None
    prefill_answers: bool = True
    labels: dict[str, str] = field(default_factory=dict[str, str])
    limit_nats: float = NOISE_NATS
    figures: VerifyFigures = field(default_factory=VerifyFigures)

    def alone(self, prompt: DrawnPrompt, engine: CheckedEngine | None = None, **fields: Any) -> CheckedAnswer:
        """Have one engine answer, without what it has cached. Raises PeerError if it uses that all the same."""
        salt = secrets.token_hex(4)
        asked = engine or self.reference
        answer = asked.ask(prompt=prompt, cache_salt=salt, **{**SCORED, **fields})
        require(answer.choice, "there is no choice")
        details: dict[str, Any] = answer.usage.get("prompt_tokens_details") or {}
        cached = details.get("cached_tokens")
        require(not cached, f"{asked.url} answers alone from {cached} cached tokens, under a cache_salt that is new")
        return answer

    def compare(self, answer: CheckedAnswer, prompt: DrawnPrompt, **fields: Any) -> float:
        """Return by how many nats an answer is off that of one engine. Raises PeerError if that is too much, or if it
        counts its tokens differently."""
        wanted = self.alone(prompt, **fields)
        nats = nats_between(answer, wanted)
        limit = f"{self.limit_nats:.2g} are allowed"
        require(nats <= self.limit_nats, f"the answer is {nats:.3g} nats off that of one engine; {limit}")
        for name in ("prompt_tokens", "completion_tokens"):
            mine, theirs = answer.usage.get(name), wanted.usage.get(name)
            require(mine == theirs, f"{name} is {mine} after a hand-off, and {theirs} without")
        return nats

    def check(self, prompt: DrawnPrompt, **fields: Any) -> float:
        """Hand a request over, and compare its answer."""
        return self.compare(self.way.hand_off(prompt, **fields), prompt, **fields)

    def harm(self, harm: Harm, prompt: DrawnPrompt) -> tuple[CheckedAnswer, Relay]:
        """Hand a request over by a relay that does harm. Raises LeftOutError without our mover, DoubtError if the relay
        is not reached."""
        direct = self.direct
        if direct is None:
            raise LeftOutError("only caches that our mover carries cross a relay")
        source = direct.pair.data_host or urlsplit(direct.pair.source.url).hostname or ""
        host = address_towards(urlsplit(direct.pair.destination.url).hostname or "")
        with Relay((source, direct.pair.data_port), host, harm, self.tls_dir) as relay:
            answer = direct.begin_through(relay.port, host, prompt).answered.answer()
        self.settle()
        if not relay.seen:
            raise DoubtError(f"the destination does not reach {host}, where this command runs: run it elsewhere")
        return answer, relay

    def engines(self) -> list[CheckedEngine]:
        """Return all engines, each once."""
        return list({one.url: one for one in (self.way.prefill, self.way.decode, self.reference)}.values())

    def settle(self) -> None:
        """Wait until nothing is held; what a broken hand-off leaves may be held for a lease."""
        for engine in (self.way.prefill, self.way.decode):
            for _ in range(2):
                with suppress(PeerError):
                    engine.wait_idle()
                    break


def nats_between(answer: CheckedAnswer, wanted: CheckedAnswer) -> float:
    """Return by how many nats two answers are apart, over all their tokens until they differ."""
    return difference(answer.scores, wanted.scores, LONG_TOKENS)


RunStep = Callable[[Kit], str]
