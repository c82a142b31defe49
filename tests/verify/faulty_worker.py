"""Our real worker with one planted fault, as a program: FAULT=NAME python faulty_worker.py FLAGS OF prfaas-worker.

No fault shows in what the product checks: caches are harmed in the engine's memory, before they leave or after they
came, so that digests match. A worker harms what it gives and what it takes, whichever role a request gives it; what it
answers by itself is right, unless a fault says otherwise below.

The front starts the engine as a process of its own. Here it starts this file once more, which plants the fault there.
The mover is the product's own.
"""

import asyncio
import itertools
import os
import signal
import sys
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakKeyDictionary

import msgspec
from aiohttp import web

if TYPE_CHECKING:  # torch takes seconds, and the front needs none
    from prfaas_worker.engine.runner import Runner
    from prfaas_worker.engine.sequences import Sequence

FAULT, AFTER = "FAULT", "FAULT_AFTER"
"""Variables: the fault's name, and after how many right answers `dies` and `lying-version` begin, 1 by default."""
EDGE_TOKENS: Final = 8
DYING_TOKEN: Final = 3
VERSIONS: Final = "0.1.0", "0.1.1"
_ENGINE: Final = "prfaas_worker.engine"

Harm = Callable[["Runner", "Sequence", int], None]
"""Changes the cache of a sequence's first tokens, so many."""


def zero_page(runner: "Runner", sequence: "Sequence", tokens: int) -> None:
    pages = _pages(runner, sequence, tokens)
    runner.memory.pages[pages[len(pages) // 2]] = 0


def zero_state(runner: "Runner", sequence: "Sequence", _tokens: int) -> None:
    runner.memory.clear_slot(sequence.held.slot)


class UseStale:
    """The cache of the prompt before of as many pages."""

    def __init__(self) -> None:
        self._former: dict[int, tuple[Any, Any]] = {}

    def __call__(self, runner: "Runner", sequence: "Sequence", tokens: int) -> None:
        memory, pages, slot = runner.memory, _pages(runner, sequence, tokens), sequence.held.slot
        own = memory.pages[pages], memory.slots[[slot]]  # copies, as of any list of places
        memory.pages[pages], memory.slots[[slot]] = self._former.get(len(pages), own)
        self._former[len(pages)] = own


def shift_at_edges(runner: "Runner", sequence: "Sequence", tokens: int) -> None:
    """At the beginning of each page are the rows of the tokens before once more."""
    for layer in _filled(runner.memory.rows, runner):
        for rows in runner.memory.rows(layer).values():
            for page, following in itertools.pairwise(_pages(runner, sequence, tokens)):
                rows[following, :EDGE_TOKENS] = rows[page, -EDGE_TOKENS:]


def drop_layer(runner: "Runner", sequence: "Sequence", tokens: int) -> None:
    """The last layer of full attention gets no rows."""
    for rows in runner.memory.rows(_filled(runner.memory.rows, runner)[-1]).values():
        rows[_pages(runner, sequence, tokens)] = 0


def swap_layers(runner: "Runner", sequence: "Sequence", tokens: int) -> None:
    """Of either kind the first and the last layer have each other's."""
    memory = runner.memory
    for part, places in ((memory.rows, _pages(runner, sequence, tokens)), (memory.states, [sequence.held.slot])):
        layers = _filled(part, runner)
        for name, first in part(layers[0]).items():
            last = part(layers[-1])[name]
            first[places], last[places] = last[places], first[places]


def cut_context(runner: "Runner", sequence: "Sequence", tokens: int) -> None:
    """The first half was never there. Attention without positions sees no difference between the second half and that
    half twice over, so its rows take all places."""
    from prfaas_worker.models.base import Batch, Chunk

    memory, slot, kept = runner.memory, sequence.held.slot, tokens // 2
    if not kept:
        return
    memory.clear_slot(slot)
    seen = sequence.token_ids[tokens - kept : tokens]
    runner.model.forward(Batch(runner._tensor(seen), (Chunk(slot, 0, kept),)))
    pages = _pages(runner, sequence, tokens)
    for layer in _filled(memory.rows, runner):
        for rows in memory.rows(layer).values():
            found = rows[pages]
            flat = found.flatten(0, 1)  # a view
            flat[:tokens] = flat[[place % kept for place in range(tokens)]]
            rows[pages] = found


def _pages(runner: "Runner", sequence: "Sequence", tokens: int) -> list[int]:
    return sequence.held.pages[: runner.memory.geometry.pages_for(tokens)]


def _filled(part: Callable[[int], Any], runner: "Runner") -> list[int]:
    """The layers that have rows, or states."""
    return [layer for layer in range(len(runner.model.layers)) if part(layer)]


HARMS: Final[dict[str, Callable[[], Harm]]] = {
    "page-zeroed": lambda: zero_page,
    "state-zeroed": lambda: zero_state,
    "stale-cache": UseStale,
    "wrong-tokens-at-block-edge": lambda: shift_at_edges,
    "layer-dropped": lambda: drop_layer,
    "layers-swapped": lambda: swap_layers,
    "context-cut": lambda: cut_context,
}


def right_answers() -> int:
    return int(os.environ.get(AFTER, "1"))


def harm_given(harm: Harm) -> None:
    """Harm what this engine gives, prompts and prefixes, once all of it is computed: until then nothing leaves."""
    from prfaas_worker.engine.loop import EngineLoop
    from prfaas_worker.engine.remote import MovedOffer

    loops: list[EngineLoop] = []
    held: WeakKeyDictionary[MovedOffer, list[Any]] = WeakKeyDictionary()
    begin, put, finish = EngineLoop.__post_init__, MovedOffer.put, MovedOffer.finish_computing

    def note_loop(self: EngineLoop, *given: Any) -> None:
        begin(self, *given)
        loops.append(self)

    def finish_harmed(self: MovedOffer, prefill_seconds: float, **known: Any) -> None:
        (loop,) = loops
        sequence = next(one for one in loop.requests.sequences() if one.request.offer is self)
        harm(loop.runner, sequence, self.manifest.end_token)
        for frame in held.pop(self, ()):
            put(self, frame)
        finish(self, prefill_seconds, **known)

    EngineLoop.__post_init__ = note_loop
    MovedOffer.put = lambda self, frame: held.setdefault(self, []).append(frame)
    MovedOffer.finish_computing = finish_harmed


def harm_taken(harm: Harm) -> None:
    """Harm what came to this engine, before it computes on it."""
    from prfaas_worker.engine.remote import RemoteCaches

    adopt = RemoteCaches._adopt

    def adopt_harmed(self: RemoteCaches, sequence: "Sequence", cache: Any) -> None:
        harm(self._runner, sequence, cache.tokens)
        adopt(self, sequence, cache)

    RemoteCaches._adopt = adopt_harmed


def change_weights() -> None:
    """Every matrix is upside down, and its digest is that of the file: whatever this engine answers is another
    model's, whose manifests say that it is the same."""
    from prfaas_worker.models.kimi_linear.checkpoint import SafetensorsCheckpoint

    read = SafetensorsCheckpoint.read

    def read_other(self: SafetensorsCheckpoint, name: str, target: Any) -> None:
        read(self, name, target)
        if target.dim() > 1:
            target.copy_(target.flip(0))

    SafetensorsCheckpoint.read = read_other


def forget_state() -> None:
    """Whoever continues behind a cached prefix has its rows, and a state of nothing: also what this engine answers by
    itself, once it knows a prompt."""
    from prfaas_worker.cache.memory import CacheMemory

    CacheMemory.load_state = lambda self, _pages, slot: self.clear_slot(slot)


def double_first_token() -> None:
    """What was drawn first behind a cache that came is drawn, and sent, once more."""
    from prfaas_worker.engine.loop import EngineLoop

    append = EngineLoop._append_token

    def append_doubled(self: EngineLoop, sequence: "Sequence", drawn: Any) -> None:
        is_first = sequence.request.prefix is not None and not sequence.generated_tokens
        append(self, sequence, drawn)
        if is_first and sequence.lease is not None and self.cache.grow(sequence.held, len(sequence.token_ids) + 1):
            append(self, sequence, drawn)

    EngineLoop._append_token = append_doubled


def die() -> None:
    """After so many answers, front and engine are killed within the next one."""
    from prfaas_worker.engine.loop import EngineLoop

    append, left = EngineLoop._append_token, right_answers()

    def append_or_die(self: EngineLoop, sequence: "Sequence", drawn: Any) -> None:
        nonlocal left
        append(self, sequence, drawn)
        if sequence.lease is None:
            left -= 1
        elif left <= 0 and sequence.generated_tokens == DYING_TOKEN:
            os.kill(os.getppid(), signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)

    EngineLoop._append_token = append_or_die


def lie_about_version() -> None:
    """GET /version, which vLLM has, and the fingerprint of GET /v1/profile, which is what our worker says of its
    version, say something else after so many answers."""
    from prfaas_worker.front import control, server

    build, read, asked = server.build_app, control.read_profile, Counter[str]()

    def is_late(path: str) -> bool:
        asked[path] += 1
        return asked[path] > right_answers()

    async def version(request: web.Request) -> web.Response:
        return web.json_response({"version": VERSIONS[is_late(request.path)]})

    async def profile(request: web.Request) -> web.Response:
        answer = await read(request)
        if is_late(request.path):
            fingerprint = msgspec.json.decode(answer.body)["fingerprint"]
            answer.body = answer.body.replace(fingerprint.encode(), fingerprint[::-1].encode())
        return answer

    def build_app(state: Any) -> web.Application:
        app = build(state)
        app.add_routes([web.get("/version", version)])
        return app

    control.read_profile, server.build_app = profile, build_app


IN_ENGINE: Final[dict[str, Callable[[], None]]] = {
    "other-weights": change_weights,
    "hit-without-state": forget_state,
    "first-token-doubled": double_first_token,
    "dies": die,
}
IN_FRONT: Final[dict[str, Callable[[], None]]] = {"lying-version": lie_about_version}
FAULTS: Final = (*HARMS, *IN_ENGINE, *IN_FRONT)


def plant_in_engine(fault: str) -> None:
    if fault in HARMS:
        harm_given(HARMS[fault]())
        harm_taken(HARMS[fault]())
    elif fault in IN_ENGINE:
        IN_ENGINE[fault]()


def run_engine(arguments: list[str]) -> None:
    """Run the engine's program. The fault comes once that is tied to its front, since torch takes seconds."""
    from prfaas_worker.engine import __main__ as program

    run = program._run

    def run_faulty(options: Any, front: Any) -> None:
        plant_in_engine(os.environ[FAULT])
        run(options, front)

    program._run = run_faulty
    sys.argv[1:] = arguments
    program.main()


def run_front() -> None:
    """Run the worker's program; its engine is this file."""
    from prfaas_worker import __main__ as program

    start = asyncio.create_subprocess_exec

    async def start_faulty(program: str, *arguments: str, **options: Any) -> asyncio.subprocess.Process:
        assert arguments[:2] == ("-m", _ENGINE), arguments
        return await start(program, __file__, *arguments[1:], **options)

    asyncio.create_subprocess_exec = start_faulty
    IN_FRONT.get(os.environ[FAULT], lambda: None)()
    program.main()


def main() -> None:
    if os.environ.get(FAULT) not in FAULTS:
        sys.exit(f"{FAULT} is {os.environ.get(FAULT)!r}; name one of {', '.join(FAULTS)}")
    if sys.argv[1:2] == [_ENGINE]:
        run_engine(sys.argv[2:])
    else:
        run_front()


if __name__ == "__main__":
    main()
