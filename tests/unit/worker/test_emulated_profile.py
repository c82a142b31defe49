"""An engine is emulated by what was measured of another one: its times, and its cache as far as they are known. A file
that cannot be emulated by is refused."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from prfaas.capacity.builtin import DecodeStep, read_builtin
from prfaas.capacity.models import MODEL_CACHES
from prfaas.capacity.profile import Sample, prefill_seconds
from prfaas.measure.answers import CacheBytes
from prfaas.measure.fit import FEW_TOKENS, Measurement, fitted, times_of
from prfaas.wire.profile import Profile
from prfaas_worker.cache_spec import CacheGeometry
from prfaas_worker.emulated.instance import EmulatedInstance
from prfaas_worker.emulated.profile import read_profile
from prfaas_worker.options import parse

from .emulated_bench import Emulated, SlowClock, prompt_of

BUILTIN = msgspec.to_builtins(read_builtin("", "qwen3.5-397b-fp8-8xh200"))
TRUE = Profile(state_bytes=62_976, token_bytes=256, fixed_seconds=0.02, token_seconds=2e-5, squared_seconds=1e-10)
STEPS = (DecodeStep(batch=1, seconds=0.004), DecodeStep(batch=32, seconds=0.01))


def measured(model: str = "org/Some_Model-8B", cache: CacheBytes | None = None) -> dict[str, Any]:
    """Return the document of `prfaas profile measure -o json`."""
    samples = [Sample(tokens, prefill_seconds(TRUE, tokens)) for tokens in (256, 1024, 4096) for _ in range(2)]
    cache = cache or CacheBytes(TRUE.state_bytes, TRUE.token_bytes, "the command line")
    profile = fitted(samples, cache)
    found = Measurement(
        model=model,
        source="http://10.0.0.5:8000",
        profile=profile,
        cache_source=cache.source,
        lengths=times_of(samples, profile),
        decode_context_tokens=1056,
        decode_steps=STEPS,
        decode_token_seconds=1e-7,
        least_prompt_seconds=prefill_seconds(TRUE, FEW_TOKENS),
    )
    return json.loads(msgspec.json.encode(found))


def off_the_fit(document: dict[str, Any]) -> dict[str, Any]:
    """Return the document of a server whose prompts take 7 % longer and shorter in turn than its fit says."""
    lengths = [
        one | {"seconds": (1.07, 0.93)[place % 2] * one["seconds"]} for place, one in enumerate(document["lengths"])
    ]
    return document | {"lengths": lengths}


def written(folder: Path, document: Any) -> str:
    path = folder / "mine.json"
    path.write_text(json.dumps(document))
    return str(path)


def test_a_measured_server_is_emulated_with_its_times(tmp_path: Path):
    instance = EmulatedInstance(read_profile(written(tmp_path, measured())), stretch=3)
    assert instance.profile.name == "org/Some_Model-8B"
    for start, tokens in ((0, 300), (0, 4096), (1024, 512)):
        seconds = instance.chunk_seconds(start, tokens, is_first=True)
        assert seconds == pytest.approx(3 * prefill_seconds(TRUE, tokens, start), rel=1e-4)
    times = instance.profile.times
    assert instance.step_seconds([], 1, 1056, 512)[1] == pytest.approx(3 * times.decode_seconds(1, 1056))
    assert times.decode_seconds(1, 1056) == pytest.approx(0.004)
    assert times.decode_seconds(32, 32 * 1056) == pytest.approx(0.01)
    assert times.decode_seconds(2, 5000) - times.decode_seconds(2, 3000) == pytest.approx(2000 * 1e-7)
    assert times.common_seconds == 0.004
    assert times.cut_seconds == pytest.approx(prefill_seconds(TRUE, FEW_TOKENS) - 0.004)
    assert instance.longest_tokens == 4096
    assert not instance.profile.in_order
    assert read_profile(written(tmp_path, measured() | {"in_order": True})).in_order


@pytest.mark.parametrize("chunk", [64, 512, 4096])
def test_a_prompt_takes_the_time_that_was_measured_and_not_that_of_the_fit(tmp_path: Path, chunk: int):
    document = off_the_fit(measured(cache=CacheBytes(1 << 20, 1 << 16, "the command line")))
    read = read_profile(written(tmp_path, document))
    engine = Emulated(SlowClock(), chunk, profile=read)
    for one in document["lengths"]:
        tokens, seconds = one["tokens"], one["seconds"]
        assert engine.answer(prompt_of(tokens, tokens), tokens)[1] == pytest.approx(seconds, rel=1e-6)
        assert abs(prefill_seconds(read.times.prefill.profile, tokens) / seconds - 1) > 0.06, "the fit would be off"


@pytest.mark.parametrize(
    ("model", "source", "layers"),
    [
        ("Qwen/Qwen3.5-35B-A3B-FP8", "the command line", MODEL_CACHES["qwen3.5-35b"]),
        ("prod", "model qwen3.5-35b", MODEL_CACHES["qwen3.5-35b"]),
        ("prod", "the command line", MODEL_CACHES["qwen3-next-80b"]),
    ],
)
def test_a_cache_has_the_measured_bytes_in_the_layers_of_the_model(
    tmp_path: Path, model: str, source: str, layers: Any
):
    document = measured(model, CacheBytes(1_000_000, 7_200, source))
    instance = EmulatedInstance(read_profile(written(tmp_path, document)), cache_scale=10)
    kinds = [bool(layer.rows) for layer in instance.layers()]
    assert (sum(kinds), len(kinds) - sum(kinds)) == (layers.attention_layers, layers.linear_layers)
    geometry = CacheGeometry(instance.layers())
    assert geometry.token_bytes == pytest.approx(720, rel=0.01)
    assert geometry.state_bytes == pytest.approx(100_000, rel=0.05)


def test_a_tiny_cache_has_no_layer_without_a_byte(tmp_path: Path):
    read = read_profile(written(tmp_path, measured(cache=CacheBytes(2, 3, "the command line"))))
    geometry = CacheGeometry(EmulatedInstance(read).layers())
    assert (geometry.token_bytes, len(geometry.layers)) == (3, 5)


def test_a_model_without_states_has_attention_alone(tmp_path: Path):
    document = measured(cache=CacheBytes(0, 131_072, "the command line"))
    instance = EmulatedInstance(read_profile(written(tmp_path, document)))
    assert all(layer.rows and not layer.state for layer in instance.layers())
    assert CacheGeometry(instance.layers()).token_bytes == pytest.approx(131_072, rel=0.01)


def test_a_file_of_a_built_in_profile_is_read_alike(tmp_path: Path):
    path = written(tmp_path, BUILTIN | {"name": "qwen3.5-397b-mine", "state_bytes": 45_000_000})
    read = read_profile(path)
    assert read.name == "qwen3.5-397b-mine"
    assert CacheGeometry(EmulatedInstance(read, 10).layers()).state_bytes == pytest.approx(4_500_000, rel=0.01)


def refusal(capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    with pytest.raises(SystemExit) as ended:
        parse(["--model-source", "builtin:kimi-linear-tiny", "--model-name", "tiny", *flags])
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


STEP = {"batch": 8, "seconds": 0.01}


@pytest.mark.parametrize(
    ("document", "sentence"),
    [
        (BUILTIN | {"decode_steps": []}, "the profile has no decode step"),
        (BUILTIN | {"name": "mine"}, "its name must begin with one of kimi-k3"),
        (BUILTIN | {"points": BUILTIN["points"][:1]}, "it knows fewer than two lengths of prompts"),
        (BUILTIN | {"token_bytes": "many"}, "cannot be read: Expected `int`, got `str`"),
        ([], "cannot be read: Expected `object`, got `array`"),
        ({"lengths": 1}, "give what `prfaas profile measure -o json` has written"),
        (measured() | {"decode_steps": []}, "the profile has no decode step"),
        (measured() | {"lengths": measured()["lengths"][:1]}, "it knows fewer than two lengths of prompts"),
        (measured() | {"decode_steps": [STEP, STEP]}, "each of more than the one before"),
        (measured() | {"decode_steps": [STEP | {"seconds": 0}]}, "each of its times must be more than 0"),
        (measured() | {"decode_steps": [STEP]}, "--max-running 32 is more than the 8 sequences"),
        (measured() | {"profile": {"state_bytes": 1, "token_bytes": 1}}, "each of its times must be more than 0"),
        (measured(cache=CacheBytes(1, 0, "x")), "its cache has 0 bytes for each token"),
    ],
)
def test_a_file_that_cannot_be_emulated_by_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, document: Any, sentence: str
):
    assert sentence in refusal(capsys, "--emulate", written(tmp_path, document))


def test_flags_must_suit_what_was_measured(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    path = written(tmp_path, measured())
    assert parse(["--model-source", "x", "--model-name", "tiny", "--emulate", path]).emulate == path
    assert "twice the 4096 tokens" in refusal(capsys, "--emulate", path, "--max-context", "8193")
    assert "less than a byte of the 21 of a layer's row" in refusal(capsys, "--emulate", path, "--cache-scale", "22")
    (tmp_path / "mine.json").write_text("# Some_Model at http://10.0.0.5:8000.\nprofiles: {}\n")
    assert "cannot be read: JSON is malformed" in refusal(capsys, "--emulate", path)
