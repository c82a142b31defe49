"""What is printed is what plans and pools read: the same curve comes back."""

import pytest
import yaml

from prfaas.api.pool import ProfileSpec
from prfaas.capacity import planfile
from prfaas.capacity.builtin import DecodeStep
from prfaas.capacity.profile import Sample, prefill_seconds
from prfaas.measure.answers import CacheBytes
from prfaas.measure.fit import Measurement, fitted, times_of
from prfaas.measure.snippets import as_yaml, profile_name
from prfaas.wire.profile import Profile

TRUE = Profile(state_bytes=62_976, token_bytes=256, fixed_seconds=0.02, token_seconds=2e-5, squared_seconds=1e-10)
STEPS = (DecodeStep(batch=8, seconds=0.0123456),)


def measurement(lengths=(256, 1024, 4096, 16_384), steps=STEPS):
    samples = [Sample(tokens, prefill_seconds(TRUE, tokens)) for tokens in lengths for _ in range(2)]
    profile = fitted(samples, CacheBytes(62_976, 256, "x"))
    return Measurement(
        model="org/Some_Model-8B",
        source="http://10.0.0.5:8000",
        profile=profile,
        cache_source="a test",
        lengths=times_of(samples, profile),
        decode_context_tokens=1056,
        decode_steps=steps,
        notes=("what: a colon and a # sign",),
    )


def documents(found):
    return list(yaml.safe_load_all(as_yaml(found)))


def test_a_plan_reads_the_same_profile_and_step():
    sections, _ = documents(measurement())
    rest = {"workload": {"histogram": {"edgesTokens": [1000, 2000], "counts": [1]}, "outputTokens": 100}, "slo": {}}
    system = planfile.read(sections | rest, lambda _: []).system
    (pool,) = system.hub
    assert (pool.max_batch, pool.step_seconds) == (8, pytest.approx(0.0123456, rel=1e-3))
    assert (pool.profile.state_bytes, pool.profile.token_bytes) == (62_976, 256)
    for tokens in (300, 3000, 30_000):
        assert prefill_seconds(pool.profile, tokens) == pytest.approx(prefill_seconds(TRUE, tokens), rel=1e-4)


def test_a_pool_takes_its_part():
    _, part = documents(measurement())
    spec = ProfileSpec.model_validate(part["profile"])
    assert (spec.token_bytes, spec.state_bytes) == (256, 62_976)
    assert [point.prefill_millis for point in spec.points] == [25, 41, 104, 375]


def test_many_lengths_become_few_points_with_the_first_and_the_last():
    lengths = [256 * 2**n for n in range(15)]
    sections, part = documents(measurement(lengths))
    points = sections["profiles"]["some-model-8b"]["points"]
    assert (len(points), points[0]["tokens"], points[-1]["tokens"]) == (8, 256, 256 * 2**14)
    assert len(part["profile"]["points"]) == 8


def test_without_decode_steps_there_is_no_hub():
    assert "hub" not in documents(measurement(steps=()))[0]


def test_the_step_of_one_stream_makes_no_hub_of_batches_of_one():
    assert "hub" not in documents(measurement(steps=(DecodeStep(batch=1, seconds=0.01),)))[0]


@pytest.mark.parametrize(("model", "name"), [("tiny", "tiny"), ("Qwen/Qwen3.5_A.B", "qwen3.5-a.b"), ("/", "measured")])
def test_a_profile_has_a_name_that_kubernetes_takes(model, name):
    assert profile_name(model) == name
