"""An emulated engine: its steps last as long as its profile says, its cache has the model's shape, its tokens depend on
the tokens before them alone, and what cannot be emulated is refused."""

import hashlib
from bisect import bisect_left
from types import SimpleNamespace
from typing import Any

import pytest

from prfaas.capacity.builtin import DecodeStep, all_builtins
from prfaas.capacity.profile import prefill_seconds
from prfaas.measure.curve import Point, PrefillTimes
from prfaas.measure.emulated import FEWEST_STEPS
from prfaas.measure.steps import StepChunk, StepTimes
from prfaas.wire.engine import Measured, Sampling, Stats, Tokens
from prfaas.wire.profile import Profile
from prfaas.wire.receive_ledger import LayerRows, LayerState
from prfaas.wire.stats import LATE_BOUNDS
from prfaas_transfer.cache import CacheLayout, MappedMemory, SharedPlace
from prfaas_worker.cache.transfer_frames import layer_groups
from prfaas_worker.cache_spec import CacheGeometry
from prfaas_worker.emulated import assembly
from prfaas_worker.emulated.instance import EmulatedInstance
from prfaas_worker.emulated.memory import EmulatedMemory
from prfaas_worker.emulated.profile import read_profile
from prfaas_worker.emulated.runner import TOKENS
from prfaas_worker.engine.shared import mover_options
from prfaas_worker.front.metrics import WorkerMetrics
from prfaas_worker.options import Options, parse

from .emulated_bench import NAME, PROFILE, Emulated, SlowClock, prompt_of

CURVE = PROFILE.times.prefill.profile
NEEDED = ["--model-source", "builtin:kimi-linear-tiny", "--model-name", "tiny"]


@pytest.mark.parametrize("step_tokens", [256, 4096, 32_768])
@pytest.mark.parametrize("tokens", [2, 700, 20_000])
def test_a_prompt_takes_the_time_of_its_profile_in_whatever_chunks(tokens: int, step_tokens: int):
    engine = Emulated(SlowClock(), step_tokens)
    assert engine.answer(prompt_of(tokens))[1] == pytest.approx(prefill_seconds(CURVE, tokens))


def test_a_cached_prefix_costs_no_time():
    engine = Emulated(SlowClock())
    engine.answer(prompt_of(4097))
    assert engine.answer(prompt_of(4097) + [1] * 500, 2)[1] == pytest.approx(prefill_seconds(CURVE, 501, 4096))


@pytest.mark.parametrize(("batch", "seconds"), [(1, 0.005393), (3, (0.005764 + 0.006494) / 2), (8, 0.007487)])
def test_a_step_decodes_in_the_time_of_its_batch(batch: int, seconds: float):
    short, long = (
        Emulated(SlowClock(), max_running=2 * batch).answer(prompt_of(300), choices=batch, max_tokens=tokens)[1]
        for tokens in (1, 11)
    )
    assert long - short == pytest.approx(10 * seconds)


def test_a_batch_beyond_the_largest_known_one_takes_as_long_as_that():
    alone = PROFILE._replace(times=PROFILE.times._replace(decode_steps=PROFILE.times.decode_steps[:1]))
    engine = Emulated(SlowClock(), max_running=2, profile=alone)
    began = engine.clock()
    engine.ask(prompt_of(1), 1, max_tokens=3)
    engine.answer(prompt_of(1), 2, max_tokens=3)
    assert engine.clock() - began == pytest.approx(3 * alone.times.decode_steps[0].seconds)


# A prompt takes 10 ms and 0.1 ms a token, a decode step 2 ms, and a further chunk 3 ms.
PLAIN = Profile(
    state_bytes=CURVE.state_bytes,
    token_bytes=CURVE.token_bytes,
    fixed_seconds=0.01,
    token_seconds=1e-4,
    samples=2,
    max_tokens=4096,
)
STEPS = StepTimes(PrefillTimes(PLAIN), (DecodeStep(batch=8, seconds=0.002),), common_seconds=0.002, cut_seconds=0.003)
SIMPLE = PROFILE._replace(times=STEPS)


def begun(engine: Emulated, prompt: list[int], **fields: Any) -> None:
    """Have a request's first token computed."""
    engine.ask(prompt, **fields)
    while not engine.sent:
        engine.engine.step(wait=False)


def test_prompts_of_one_step_pay_what_any_step_costs_once():
    """Each prompt has two chunks: the second begins at the last block, where the state is kept."""
    engine = Emulated(SlowClock(), 4096, profile=SIMPLE)
    engine.ask(prompt_of(300))
    _, seconds = engine.answer(prompt_of(700, seed=2), 2)
    assert seconds == pytest.approx(0.04 + 0.08 - 2 * 0.002)


def test_a_prompt_beside_decodes_costs_less_than_both_apart():
    engine = Emulated(SlowClock(), 4096, profile=SIMPLE)
    begun(engine, prompt_of(300), max_tokens=21)
    _, seconds = engine.answer(prompt_of(700, seed=2), 2)
    assert seconds == pytest.approx(20 * 0.002 + 0.08 - 2 * 0.002)


def test_a_prompt_that_others_cut_short_pays_for_its_further_chunks():
    """Beside decodes it has 256 tokens a step: 640 of its 700 are cut twice."""
    engine = Emulated(SlowClock(), 512, profile=SIMPLE)
    begun(engine, prompt_of(300), max_tokens=21)
    _, seconds = engine.answer(prompt_of(700, seed=2), 2)
    first_two_ms = 3 * 0.5 + 3  # half of a chunk of 512, then one that could have been the last but for the decodes
    assert seconds == pytest.approx(20 * 0.002 + 0.08 + first_two_ms / 1000 - 2 * 0.002 - 0.5 * 0.002)


@pytest.mark.parametrize("step_tokens", [256, 512, 4096])
def test_a_prompt_beside_decodes_adds_what_was_measured_of_one_in_whatever_chunks(step_tokens: int):
    beside = PrefillTimes.through([Point(700, 0.11), Point(1400, 0.2)], PLAIN)
    profile = SIMPLE._replace(times=STEPS._replace(beside_decodes=beside))
    engine = Emulated(SlowClock(), step_tokens, profile=profile)
    begun(engine, prompt_of(300), max_tokens=41)
    _, seconds = engine.answer(prompt_of(700, seed=2), 2)
    assert seconds == pytest.approx(40 * 0.002 + 0.11), "alone it takes 0.08 s"


def test_of_two_prompts_beside_decodes_both_pay_for_their_further_chunks():
    """Each of 512 tokens would be one chunk, but for the other one."""
    beside = PrefillTimes.through([Point(512, 0.1)], PLAIN)
    times = STEPS._replace(beside_decodes=beside)
    one, half = StepChunk(0, 512, 512, is_first=True), StepChunk(0, 256, 512, is_first=True)
    assert times.step_seconds([one], 1, 0, 512) == pytest.approx((0.1, 0.102))
    each = beside.chunk_seconds(0, 256, is_first=True)
    assert times.step_seconds([half, half], 1, 0, 512)[0] == pytest.approx(2 * (each + 0.003))
    assert times.step_seconds([], 1, 0, 512) == (0, 0.002)


@pytest.mark.parametrize("in_order", [False, True])
def test_a_prompt_that_comes_during_a_step_is_computed_in_the_next_one_by_an_engine_in_order(in_order: bool):
    """By ours it is admitted in that one, and computed in the one after."""
    engine = Emulated(SlowClock(), 1024, profile=SIMPLE._replace(in_order=in_order))
    begun(engine, prompt_of(300), max_tokens=21)
    engine.ask(prompt_of(60, seed=2), 2)
    began = engine.clock.seconds
    while not any(isinstance(one, Tokens) and one.handle == 2 for _, one in engine.sent):
        engine.engine.step(wait=False)
    first = 0.01 + 60 * 1e-4 + 0.002 - 0.002
    assert engine.clock.seconds - began == pytest.approx(first if in_order else 0.002 + first)


def test_a_token_of_context_costs_what_was_measured():
    profile = SIMPLE._replace(times=STEPS._replace(context_tokens=300, decode_token_seconds=1e-6))
    short, long = (
        Emulated(SlowClock(), profile=profile).answer(prompt_of(tokens), max_tokens=2)[1] for tokens in (300, 1300)
    )
    assert long - short == pytest.approx(1000 * (1e-4 + 1e-6))


def test_all_times_are_stretched_alike():
    plain, slow = EmulatedInstance(PROFILE), EmulatedInstance(PROFILE, stretch=20)
    for is_first in (True, False):
        chunk = plain.chunk_seconds(4096, 1024, is_first=is_first)
        assert slow.chunk_seconds(4096, 1024, is_first=is_first) == pytest.approx(20 * chunk)
    for profile in (PROFILE, SIMPLE):
        plain, slow = EmulatedInstance(profile), EmulatedInstance(profile, stretch=20)
        step = [StepChunk(4096, 300, 900, is_first=False)], 5, 99, 512
        assert slow.step_seconds(*step) == pytest.approx([20 * seconds for seconds in plain.step_seconds(*step)])


def test_late_wake_ups_do_not_add_up_and_are_counted():
    exact, late = Emulated(SlowClock()), Emulated(SlowClock(late_seconds=0.004))
    wanted = exact.answer(prompt_of(60), max_tokens=100)[1]
    assert late.answer(prompt_of(60), max_tokens=100)[1] == pytest.approx(wanted + 0.004)
    for engine, shares in ((exact, (0.0, 0.0)), (late, (0.004 / prefill_seconds(CURVE, 60), 0.004 / 0.005393))):
        found = engine.engine.runner.emulation()
        assert found is not None
        assert (found.profile, found.cache_scale) == (NAME, 1024)
        for lateness, steps, share in zip((found.prefills, found.decodes), (1, 99), shares, strict=True):
            assert lateness.counts[bisect_left(LATE_BOUNDS, share)] == sum(lateness.counts) == steps
            assert lateness.total == pytest.approx(share * steps)


def test_steps_of_one_prompt_after_the_other_lie_on_one_line():
    """None of them is in the step before."""
    exact, late = Emulated(SlowClock(), 60), Emulated(SlowClock(late_seconds=0.004), 60)
    for engine in (exact, late):
        for handle in range(2, 5):
            engine.ask(prompt_of(60, seed=handle), handle)
    wanted = exact.answer(prompt_of(60))[1]
    assert wanted < late.answer(prompt_of(60))[1] < wanted + 0.0041
    found = late.engine.runner.emulation()
    assert found is not None
    assert found.prefills.total > 0, "late all the same"


def test_what_a_long_pause_takes_is_not_caught_up():
    engine = Emulated(SlowClock())
    wanted = Emulated(SlowClock()).answer(prompt_of(60), max_tokens=100)[1]
    begun(engine, prompt_of(60), max_tokens=100)
    pause_seconds = 1.0
    engine.clock.seconds += pause_seconds
    while engine.engine.step(wait=False):
        pass
    taken = engine.clock.seconds - 100.0
    assert wanted + 0.9 * pause_seconds < taken < wanted + pause_seconds, "but for a twentieth of a second"
    found = engine.engine.runner.emulation()
    assert found is not None
    assert found.decodes.total > 0.9 * pause_seconds / 0.005393, "and it is counted, as what lies before a long step is"


def test_the_last_token_behind_a_cache_costs_a_decode_step():
    engine = Emulated(SlowClock())
    engine.answer(prompt_of(4097))
    assert engine.answer(prompt_of(4097), 2)[1] == pytest.approx(0.005393)


def test_an_idle_engine_begins_a_step_when_its_work_comes():
    engine = Emulated(SlowClock())
    first = engine.answer(prompt_of(100))[1]
    engine.clock.seconds += 60
    assert engine.answer(prompt_of(100, seed=2), 2)[1] == pytest.approx(first)


def test_an_answer_depends_on_the_tokens_before_it_alone():
    whole, _ = Emulated(SlowClock()).answer(prompt_of(300), max_tokens=40)
    rest, _ = Emulated(SlowClock(0.01), 256).answer(prompt_of(300) + whole[:15], max_tokens=25, cache_salt="other")
    assert whole[15:] == rest
    assert set(whole) <= set(TOKENS)
    assert len(set(whole)) > 10
    assert Emulated(SlowClock()).answer(prompt_of(300, seed=2), max_tokens=40)[0] != whole


def test_a_seed_and_a_choice_make_other_answers_and_a_stop_token_ends_one():
    drawn = {"max_tokens": 20, "sampling": Sampling(1.0, 1.0, 0, 5)}
    whole, _ = Emulated(SlowClock()).answer(prompt_of(9), **drawn)
    again, _ = Emulated(SlowClock()).answer(prompt_of(9), **drawn)
    other, _ = Emulated(SlowClock()).answer(prompt_of(9), **drawn | {"sampling": Sampling(1.0, 1.0, 0, 6)})
    assert whole == again != other
    cut, _ = Emulated(SlowClock()).answer(prompt_of(9), **drawn, stop_token_ids=(whole[3],))
    assert cut == whole[: whole.index(whole[3])]
    held, _ = Emulated(SlowClock()).answer(prompt_of(9), **drawn, stop_token_ids=(whole[3],), min_tokens=20)
    assert len(held) == 20
    assert whole[3] not in held


@pytest.mark.parametrize("profile", [one for one in all_builtins() if one.decode_steps], ids=lambda one: one.name)
@pytest.mark.parametrize("scale", [1, 64])
def test_a_cache_has_the_models_layers_and_the_profiles_bytes(profile: Any, scale: int):
    layers = EmulatedInstance(read_profile(profile.name), scale).layers()
    geometry, (linear, attention) = CacheGeometry(layers), sorted(layer_groups(layers), key=lambda one: one.kind)[::-1]
    assert geometry.token_bytes == pytest.approx(profile.token_bytes / scale, rel=0.01)
    assert len(linear.layers) * linear.nbytes == pytest.approx(profile.state_bytes / scale, rel=0.01)
    gaps = {later - sooner for sooner, later in zip(attention.layers, attention.layers[1:], strict=False)}
    assert max(gaps) - min(gaps) <= 1, "attention is spread evenly"


@pytest.mark.parametrize("state_pages", [[], [n * 7 % 101 for n in range(99)]])
def test_the_mover_maps_the_places_that_the_engine_names(state_pages: list[int]):
    layers = EmulatedInstance(PROFILE, 1024).layers()
    memory = EmulatedMemory(CacheGeometry(layers), num_pages=101, num_slots=2)
    assert memory.geometry.pages_per_state == 99
    layout = CacheLayout("f" * 64, layer_groups(layers))
    options = mover_options(Options(model_source="", model_name=""), layout, memory)
    assert options.map is not None
    assert options.map.nbytes == len(memory._bytes)
    mapped, place = MappedMemory(memory._bytes, options.map), SharedPlace(1, [4, 0, 2], state_pages)
    for index, group in enumerate(layout.groups):
        for layer in group.layers:
            (tensor,) = group.tensors
            part: LayerRows | LayerState = LayerState(index, layer)
            if group.kind == "linear" and state_pages:
                ours = memory.paged_state_bytes(layer, tensor.name, state_pages)
            elif group.kind == "linear":
                ours = [memory.state_bytes(layer, tensor.name, 1)]
            else:
                ours = memory.row_bytes(layer, tensor.name, place.pages, (60, 150))
                part = LayerRows(index, layer, 60, 90)
            for number, piece in enumerate(ours):
                piece[:] = hashlib.shake_128(bytes([index, layer, number])).digest(len(piece))
            assert [bytes(one) for one in mapped.pieces(group, place, part)] == [bytes(one) for one in ours]


def test_metrics_say_that_an_engine_is_emulated_and_how_late_it_is():
    engine = Emulated(SlowClock(0.002))
    engine.answer(prompt_of(50), max_tokens=1 + FEWEST_STEPS)
    stats = Stats(emulation=engine.engine.runner.emulation())
    text = WorkerMetrics().render(stats).decode()
    assert f'prfaas_emulated{{profile="{NAME}"}} 1.0' in text
    assert "prfaas_emulation_cache_scale 1024.0" in text
    assert 'prfaas_emulation_late_ratio_count{step="decode"} 100.0' in text
    assert "prfaas_emulation_busy_seconds_total" in text
    assert "prfaas_emulation_too_slow 1.0" in text
    assert "prfaas_emulat" not in WorkerMetrics().render(Stats()).decode()


@pytest.mark.parametrize(
    ("flags", "seconds"),
    [(["--load-seconds", "90"], 90.0), (["--load-seconds", "90", "--stretch", "2"], 180.0), ([], 0.0)],
)
def test_an_engine_loads_for_its_stretched_time_before_it_says_anything(
    monkeypatch: pytest.MonkeyPatch, flags: list[str], seconds: float
):
    events = list[object]()
    monkeypatch.setattr(assembly, "time", SimpleNamespace(sleep=events.append))
    outbox: Any = SimpleNamespace(put=events.extend)
    size = ["--cache-scale", "1024", "--cache-mib", "64", "--max-context", "8192"]
    assembly.load_and_assemble(parse([*NEEDED, "--emulate", NAME, *size, *flags]), outbox)
    assert events[0] == seconds
    assert {type(one) for one in events[1:]} == {Measured}, "what makes it ready comes later"


def refusal(capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    with pytest.raises(SystemExit) as ended:
        parse([*NEEDED, *flags])
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--emulate", "qwen3.5-397b"], "--emulate is 'qwen3.5-397b', which is no built-in profile; near it are"),
        (["--emulate", NAME, "--stretch", "0"], "'--stretch': '0' is not a number above 0"),
        (["--emulate", NAME, "--stretch", "nan"], "'--stretch': 'nan' is not a number above 0"),
        (["--emulate", NAME, "--cache-scale", "0"], "'--cache-scale': '0' is not a whole number from 1"),
        (
            ["--emulate", NAME, "--cache-scale", "2049"],
            "less than a byte of the 2048 of a layer's row: give at most 2048",
        ),
        (["--emulate", NAME, "--max-running", "257"], "more than the 256 sequences of the largest decode step"),
        (["--emulate", NAME, "--max-context", "262145"], "more than twice the 131072 tokens of the longest prompt"),
        (["--emulate", NAME, "--wire-codec", "int8"], "an emulated cache has no content to compress"),
        (["--stretch", "2"], "are of an emulated engine: give --emulate"),
    ],
)
def test_what_cannot_be_emulated_is_refused(capsys: pytest.CaptureFixture[str], flags: list[str], sentence: str):
    assert sentence in refusal(capsys, *flags)
