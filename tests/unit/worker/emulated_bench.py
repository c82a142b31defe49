"""An emulated engine without processes, whose clock the test has."""

import queue
from functools import partial
from types import SimpleNamespace
from typing import Any

from prfaas.schedule import role_budgets, slots_for
from prfaas.wire.engine import Generate, Role, Sampling, ToFront, Tokens
from prfaas_worker.cache.cache import HybridCache
from prfaas_worker.cache_spec import CacheGeometry
from prfaas_worker.emulated.assembly import EmulatedModel
from prfaas_worker.emulated.instance import EmulatedInstance
from prfaas_worker.emulated.memory import EmulatedMemory
from prfaas_worker.emulated.profile import EmulatedProfile, read_profile
from prfaas_worker.emulated.runner import EmulatedRunner
from prfaas_worker.engine.loop import EngineLoop
from prfaas_worker.engine.profiler import Profiler
from prfaas_worker.engine.remote import RemoteCaches, received_origins
from prfaas_worker.engine.sequences import Event

NAME = "qwen3.5-397b-fp8-8xh200"
PROFILE = read_profile(NAME)
GREEDY = Sampling(0.0, 1.0, 0, 0)


class SlowClock:
    """A clock that stands still but for sleeps, each of which lasts longer than asked by so many seconds."""

    def __init__(self, late_seconds: float = 0.0):
        self.seconds, self.late_seconds = 100.0, late_seconds

    def __call__(self) -> float:
        return self.seconds

    def sleep(self, seconds: float) -> None:
        self.seconds += seconds + self.late_seconds


class Emulated:
    """An emulated engine without processes, whose clock the test has."""

    def __init__(
        self,
        clock: SlowClock,
        step_tokens: int = 1024,
        max_running: int = 8,
        *,
        role: Role = "mixed",
        pages: int = 600,
        max_waiting: int = 8,
        profile: EmulatedProfile = PROFILE,
    ):
        self.clock, self.sent = clock, list[tuple[float, ToFront]]()
        instance = EmulatedInstance(profile, cache_scale=1024)
        geometry = CacheGeometry(instance.layers())
        memory = EmulatedMemory(geometry, num_pages=pages, num_slots=slots_for(max_running))
        model = EmulatedModel(264, 32_768, "f" * 64, instance.layers())
        runner, cache = EmulatedRunner(model, memory, instance, step_tokens, clock, clock.sleep), HybridCache(memory)
        inbox: queue.SimpleQueue[Event] = queue.SimpleQueue()
        fetcher: Any = SimpleNamespace()
        self.engine = EngineLoop(
            inbox=inbox,
            runner=runner,
            cache=cache,
            kv_events=[],
            publish=lambda _batch: None,
            remote=RemoteCaches(runner, cache, fetcher, inbox.put, partial(received_origins, "hub", True)),
            profiler=Profiler(1, 1, lambda _profile: None),
            send=self._note,
            role=role,
            max_running=max_running,
            max_waiting=max_waiting,
            budgets=role_budgets(step_tokens, in_order=profile.in_order),
        )

    def _note(self, messages: list[ToFront]) -> None:
        self.sent += ((self.clock(), one) for one in messages)

    def ask(self, prompt: list[int], handle: int = 1, **fields: Any) -> None:
        known: dict[str, Any] = {"choices": 1, "max_tokens": 1, "sampling": GREEDY, "logprobs": -1}
        self.engine.inbox.put(Generate(handle=handle, request_id="r", token_ids=prompt, **(known | fields)))

    def answer(self, prompt: list[int], handle: int = 1, **fields: Any) -> tuple[list[int], float]:
        """Return an answer's tokens, and how long it took."""
        self.ask(prompt, handle, **fields)
        began = self.clock()
        while self.engine.step(wait=False):
            pass
        mine = [one for _, one in self.sent if isinstance(one, Tokens) and one.handle == handle]
        return [token for one in mine for token in one.token_ids], self.clock() - began


def prompt_of(tokens: int, seed: int = 1) -> list[int]:
    return [(seed + place * 7919) % 251 for place in range(tokens)]
