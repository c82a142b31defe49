"""The profile that an engine is emulated by: what was measured of it, less what the emulated worker takes beside it.

What a client measures holds HTTP and the front, some milliseconds. The emulated worker has its own, which would count
twice. So the client measures that too, of an emulated worker whose prefills take no time, and takes it off the profile.
What prompts add to the steps of streams holds neither.
"""

import random
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec
from benchmarks.emulation.engines import BATCH, ROLE, STEP_TOKENS, Engine, Kind, worker
from benchmarks.emulation.load import Waits, new_prompt
from benchmarks.report import percentile, say

from prfaas.cli.measured_server import HttpServer
from prfaas.errors import CapacityError
from prfaas.measure.answers import CacheBytes, ServedCard
from prfaas.measure.curve import Point, PrefillTimes
from prfaas.measure.fit import FEW_TOKENS, Measurement
from prfaas.measure.session import Session, reach_of
from prfaas.simulate.events import EventQueue
from prfaas.simulate.instance import InstanceKind, Notices, SimulatedInstance
from prfaas.simulate.request import Arrival, Request
from prfaas.wire.profile import Profile

LENGTHS: Final = tuple(round(50 * 2 ** (step / 3)) for step in range(15))
"""Up to 1,270 tokens, nearly as near to each other as a measurement tells lengths apart: an engine's chunks make
steps."""
TRIES: Final = 3
NO_SECONDS: Final = 1e-6
OWN_REPEATS: Final = 12


def measured(engine: Engine, cache: CacheBytes) -> Measurement:
    """Return the profile of an engine that has no other requests. Raises CapacityError on a machine that is busy again
    and again."""
    with HttpServer(engine.url) as server:
        card = server.card()
        for _ in range(TRIES - 1):
            try:
                return measured_once(server, card, cache)
            except CapacityError as error:
                say(str(error))
        return measured_once(server, card, cache)


def measured_once(server: HttpServer, card: ServedCard, cache: CacheBytes) -> Measurement:
    session = Session(server, reach_of(card, LENGTHS[-1]), random.Random(), say, LENGTHS)
    found = session.measure(card, server.url, cache)
    if not any(step.batch >= BATCH for step in found.decode_steps):
        raise CapacityError(f"no decode step of {BATCH} streams was measured: other work disturbs this machine")
    if len(found.beside_decodes) < len(found.lengths) / 2:
        raise CapacityError("few prompts beside streams could be measured: other work disturbs this machine")
    return found


def own_times(path: Path, found: Measurement, flags: Sequence[str]) -> PrefillTimes:
    """Return the times to the first token of an emulated worker whose engine takes none. `path` is overwritten."""
    quick = msgspec.structs.replace(found.profile, fixed_seconds=NO_SECONDS, token_seconds=0.0, squared_seconds=0.0)
    lengths = [msgspec.structs.replace(one, seconds=NO_SECONDS) for one in found.lengths]
    idle = msgspec.structs.replace(found, profile=quick, lengths=tuple(lengths), least_prompt_seconds=0.0)
    path.write_bytes(msgspec.json.encode(idle))
    points, rng = list[Point](), random.Random()
    with worker("--emulate", str(path), *flags) as emulated, HttpServer(emulated.url) as server:
        server.card()
        for tokens in (FEW_TOKENS, *(one.tokens for one in found.lengths)):
            prompts = [new_prompt(rng, tokens) for _ in range(OWN_REPEATS)]
            points.append(Point(tokens, statistics.median(server.ask([one], 1)[0].first_seconds for one in prompts)))
    return PrefillTimes.through(points, Profile(state_bytes=1, token_bytes=1))


def without(found: Measurement, own: PrefillTimes) -> Measurement:
    """Return a measurement without the time that the worker's own front takes."""

    def rest(tokens: int, seconds: float) -> float:
        return max(NO_SECONDS, seconds - own.prompt_seconds(tokens))

    lengths = [msgspec.structs.replace(one, seconds=rest(one.tokens, one.seconds)) for one in found.lengths]
    least = rest(FEW_TOKENS, found.least_prompt_seconds)
    return msgspec.structs.replace(found, lengths=tuple(lengths), least_prompt_seconds=least)


def simulated_waits(
    found: Measurement, own: PrefillTimes, stretch: float, kind: Kind, arrivals: Sequence[Arrival]
) -> Waits:
    """Return the times to the first token by the simulator's instance, whose times are `stretch` times as long, and by
    the front, whose are not."""
    events, waits = EventQueue(), list[float]()

    def first(request: Request) -> None:
        engine_seconds = stretch * events.now - request.arrival.at_seconds
        waits.append(engine_seconds + own.prompt_seconds(request.arrival.input_tokens))

    notices = Notices(first, lambda _: None)
    simulated = InstanceKind.of(found.profile, BATCH, 0.0, STEP_TOKENS)
    one = SimulatedInstance(events, simulated._replace(measured=found.times, budgets=kind.budgets), ROLE, notices)
    for index, arrival in enumerate(arrivals):
        request, sizes = Request(index, arrival), (arrival.input_tokens, arrival.output_tokens)
        events.at(arrival.at_seconds / stretch, lambda request, sizes=sizes: one.serve(request, 0, *sizes), request)
    while events.step():
        pass
    return Waits(statistics.mean(waits), percentile(waits, 0.9))
