"""How an emulated worker is compared with a real engine: by the same requests, with figures that tell both apart."""

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from benchmarks.emulation.engines import CONTEXT, KINDS
from benchmarks.emulation.load import MIXES, Mix, Outcome, Task, Waits, capacity, drawn, outcome, waited_of_busiest
from benchmarks.emulation.models import deepened, source_layer
from benchmarks.emulation.pairs import Pair, Runs, compared, two_pairs
from benchmarks.emulation.profile import LENGTHS, simulated_waits, without

from prfaas.capacity.builtin import DecodeStep
from prfaas.capacity.profile import Sample, prefill_seconds
from prfaas.errors import ConfigError
from prfaas.measure.answers import StreamedAnswer, TokenMark
from prfaas.measure.curve import Point, PrefillTimes
from prfaas.measure.fit import FEW_TOKENS, AddedTime, LengthTimes, Measurement, times_of
from prfaas.simulate.request import Arrival
from prfaas.wire.profile import Profile
from prfaas_worker.assets import model_directory
from prfaas_worker.models.kimi_linear.checkpoint import SafetensorsCheckpoint
from prfaas_worker.models.kimi_linear.config import read_config

PROFILE = Profile(state_bytes=1, token_bytes=1, fixed_seconds=0.01, token_seconds=1e-4, samples=2, max_tokens=4096)


def times_at(tokens: int) -> LengthTimes:
    """Return what was measured: a tenth more than the fit says, but for the longest."""
    fit = prefill_seconds(PROFILE, tokens)
    seconds = (1.1 if tokens < 8192 else 1.0) * fit
    spread = {"quickest_seconds": seconds, "slowest_seconds": seconds}
    return LengthTimes(tokens=tokens, repeats=3, near=3, seconds=seconds, fitted_seconds=fit, **spread)


FOUND = Measurement(
    model="m",
    source="s",
    profile=PROFILE,
    cache_source="c",
    lengths=tuple(times_at(tokens) for tokens in (512, 1024, 8192)),
    decode_context_tokens=1056,
    decode_steps=(DecodeStep(batch=1, seconds=0.002), DecodeStep(batch=8, seconds=0.008)),
    least_prompt_seconds=0.005,
)


def test_a_rate_at_capacity_leaves_no_time():
    short, long, kind = Mix("short", 512, 512, 17), Mix("long", 8192, 8192, 17), KINDS["vllm"]
    assert capacity(FOUND, short, kind) == pytest.approx(1 / (1.1 * 0.0612 + 16 / 8 * 0.008)), "not by the fit"
    # Sixteen chunks a prompt, beside each of which one further token is decoded for one stream.
    assert capacity(FOUND, long, kind) == pytest.approx(1 / (0.8292 + 16 * 0.002))
    beside = (AddedTime(tokens=512, seconds=0.09),)
    found = msgspec.structs.replace(FOUND, beside_decodes=beside)
    assert capacity(found, short, kind) == pytest.approx(1 / (0.09 + 16 / 8 * 0.008)), "prompts come beside decodes"
    with pytest.raises(ConfigError, match="no decode step of 8 streams"):
        capacity(msgspec.structs.replace(FOUND, decode_steps=FOUND.decode_steps[:1]), short, kind)


def test_requests_come_at_the_rate_with_the_lengths_of_their_mix_and_the_same_again():
    for mix in MIXES:
        made = drawn(mix, 20.0, 100.0, 3)
        assert len(made) == pytest.approx(2000, rel=0.1)
        assert made == drawn(mix, 20.0, 100.0, 3) != drawn(mix, 20.0, 100.0, 4)
        lengths = [one.input_tokens for one in made]
        assert mix.shortest <= min(lengths) < 1.1 * mix.shortest
        assert 0.9 * mix.longest < max(lengths) <= mix.longest


def test_waits_begin_when_a_request_was_due_and_not_when_it_was_sent():
    arrivals = [Arrival(1.0, 10, 4), Arrival(2.0, 10, 4)]
    answers = [
        StreamedAnswer(101.4, (TokenMark(101.5, 1), TokenMark(102.0, 4)), 10, 0),
        StreamedAnswer(102.0, (TokenMark(102.1, 1), TokenMark(103.0, 4)), 10, 0),
    ]
    seen = outcome(arrivals, 100.0, answers)
    assert seen.mean_seconds == pytest.approx((0.5 + 0.1) / 2)
    assert seen.p90_seconds == pytest.approx(0.5)
    assert seen.tokens_per_second == pytest.approx(8 / 2)


def test_all_lengths_of_the_benchmark_are_told_apart():
    samples = [Sample(tokens, prefill_seconds(PROFILE, tokens)) for tokens in LENGTHS]
    assert [one.tokens for one in times_of(samples, PROFILE)] == list(LENGTHS)
    assert LENGTHS[0] <= min(mix.shortest for mix in MIXES)
    assert LENGTHS[-1] >= max(mix.longest for mix in MIXES)


OWN = PrefillTimes.through([Point(FEW_TOKENS, 0.002), Point(8192, 0.003)], Profile(state_bytes=1, token_bytes=1))


def test_the_workers_own_front_is_taken_off_the_measured_points():
    left = without(FOUND, OWN)
    for one, measured in zip(left.lengths, FOUND.lengths, strict=True):
        assert one.seconds == pytest.approx(measured.seconds - OWN.prompt_seconds(one.tokens))
        assert left.times.prefill.prompt_seconds(one.tokens) == pytest.approx(one.seconds)
    assert left.least_prompt_seconds == pytest.approx(0.003)
    slow = PrefillTimes.through([Point(1, 99.0)], PROFILE)
    assert min(one.seconds for one in without(FOUND, slow).lengths) > 0, "never nothing"


def test_the_simulator_gets_the_same_requests_with_the_times_of_the_emulated_worker():
    bare = without(FOUND, OWN)
    apart, together = ([Arrival(1.0, 512, 1), Arrival(at, 512, 1)] for at in (3.0, 1.0))
    alone, own = FOUND.lengths[0].seconds, OWN.prompt_seconds(512)
    assert simulated_waits(bare, OWN, 1.0, KINDS["worker"], apart) == pytest.approx((alone, alone))
    stretched = simulated_waits(bare, OWN, 2.0, KINDS["worker"], apart)
    assert stretched.mean_seconds == pytest.approx(2 * (alone - own) + own), "the front is as quick as ever"
    waits = simulated_waits(bare, OWN, 1.0, KINDS["worker"], together)
    assert waits.mean_seconds > 1.4 * alone, "one waits"
    assert waits.p90_seconds > waits.mean_seconds, "the one that waits"


def test_each_figure_stands_beside_that_of_the_real_engine_and_by_how_much_it_is_off():
    pairs = [
        Pair(Outcome(0.08, 0.25, 40.0), Outcome(0.104, 0.18, 50.0), Waits(0.1, 0.16)),
        Pair(Outcome(0.12, 0.15, 60.0), Outcome(0.104, 0.18, 50.0), Waits(0.1184, 0.164)),
    ]
    made = list(compared("short", pairs, 10.0))
    assert [one.value for one in made[:6:2]] == pytest.approx([104, 180, 50])
    assert [one.rival_value for one in made[:6:2]] == pytest.approx([100, 200, 50])
    assert [one.value for one in made[1:6:2]] == pytest.approx([4, 10, 0])
    assert {one.reach for one in made[1:6:2]} == {10.0}
    assert [one.value for one in made[6:]] == pytest.approx([5, 10]), "the simulator is off the emulated worker"
    assert {one.reach for one in made[6:]} == {5.0}


class Machine:
    """Takes a tenth of a second for a reference and ten for a run, on its own clock, at a pace that changes with it."""

    def __init__(self, pace: Callable[[float], float], *, lost: str = ""):
        self.now, self.pace, self.lost = 0.0, pace, lost
        self.order = list[str]()

    def runs(self, name: str) -> Runs:
        return Runs(lambda: self.real(name), lambda pace: self.emulated(name, pace), self.reference)

    def real(self, name: str) -> Outcome | None:
        seen = self.pace(self.now + 5)
        return self.run(f"real {name}", seen)

    def emulated(self, name: str, pace: float) -> tuple[Outcome, Waits] | None:
        seen = self.run(f"emulated {name}", pace)
        return None if seen is None else (seen, Waits(pace, pace))

    def run(self, name: str, seconds: float) -> Outcome | None:
        self.now += 10
        self.order.append(name)
        return None if name == self.lost else Outcome(seconds, seconds, 1 / seconds)

    def reference(self) -> float:
        self.now += 0.1
        return self.pace(self.now)

    def pairs(self) -> list[Pair | None]:
        return two_pairs(self.runs("a"), self.runs("b"))


def off(pair: Pair | None) -> float:
    assert pair is not None
    return abs(pair.emulated.mean_seconds / pair.real.mean_seconds - 1)


def test_runs_are_made_in_turns_and_the_second_pair_the_other_way_round():
    machine = Machine(lambda _: 1.0)
    assert [off(pair) for pair in machine.pairs()] == [0, 0]
    assert machine.order == ["real a", "emulated a", "emulated b", "real b"]


def test_a_slow_drift_is_in_the_emulated_runs_too():
    drifting = Machine(lambda now: 1.1 + 0.001 * now)
    first, second = drifting.pairs()
    assert off(first) < 0.001, "its pace is known from before and after"
    assert off(second) < 0.015, "its pace is that of before"


def test_a_pair_in_which_the_reference_moved_does_not_count():
    def jumps(now: float) -> float:
        return 1.0 if now < 25 else 1.04

    first, second = Machine(jumps).pairs()
    assert first is not None
    assert second is None
    bump = Machine(lambda now: 1.04 if 9 < now < 11 else 1.0)
    assert bump.pairs()[0] is None
    assert None not in Machine(lambda now: jumps(now) - 0.02 * (now > 25)).pairs(), "two per cent are not much"


@pytest.mark.parametrize(("lost", "left"), [("real a", [1]), ("emulated b", [0])])
def test_a_run_that_does_not_count_takes_its_pair_with_it(lost: str, left: list[int]):
    made = Machine(lambda _: 1.0, lost=lost).pairs()
    assert [place for place, pair in enumerate(made) if pair is not None] == left


def test_the_thread_that_computes_is_the_one_whose_waits_count():
    before = {"engine": Task(5.0, 0.1), "idle": Task(9.0, 1.0)}
    after = {"engine": Task(14.0, 0.3), "idle": Task(9.1, 4.0), "new": Task(2.0, 2.0)}
    assert waited_of_busiest(before, after) == pytest.approx(0.2)
    assert waited_of_busiest({}, after) == pytest.approx(0.3)


def test_the_worker_has_room_for_the_longest_prompt_and_its_profile_reaches_as_far():
    longest = max(mix.longest + mix.answer_tokens for mix in MIXES)
    assert longest <= CONTEXT <= 2 * LENGTHS[-1], "an emulated worker takes no longer context than that"


def test_a_deep_model_is_one_that_the_worker_reads(tmp_path: Path):
    source, directory = model_directory("builtin:kimi-linear-tiny"), deepened("kimi-linear-tiny", 3, tmp_path)
    config = read_config(directory)
    assert [kind == "attention" for kind in config.layer_kinds] == 3 * [False, False, False, True]
    assert sum(config.dense_layers) == 1
    deep, shipped = (SafetensorsCheckpoint(*one) for one in ((directory, config), (source, read_config(source))))
    last = "model.layers.{}.self_attn.kv_a_proj_with_mqa.weight"
    assert deep.shape(last.format(11)) == shipped.shape(last.format(3)), "its constructor has compared all others"


def test_a_deep_layer_copies_one_of_its_kind():
    assert [source_layer(layer, 4) for layer in range(12)] == [0, 1, 2, 3, 1, 1, 2, 3, 1, 1, 2, 3]


def test_an_emulated_engine_in_order_cuts_no_prompt():
    cache, longest = KINDS["vllm"].cache, LENGTHS[-1]
    assert cache.state_bytes / (64 * cache.token_bytes) > longest
