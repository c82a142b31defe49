"""The built-in profiles: the curve meets lengths that it was not fitted to, weights fit, and sizes are the models'."""

from itertools import pairwise

import msgspec
import pytest

from prfaas.capacity.builtin import Builtin, PrefillTime, builtin_names, read_builtin
from prfaas.capacity.memory import DEVICE_BYTES, USABLE
from prfaas.capacity.models import MODEL_CACHES
from prfaas.capacity.profile import cache_bytes, prefill_seconds
from prfaas.errors import ConfigError

BUILTINS = [read_builtin("name", name) for name in builtin_names()]
CHECKED_TOKENS = (3_072, 24_576, 98_304)
H200 = "qwen3.5-397b-fp8-8xh200"
every_profile = pytest.mark.parametrize("builtin", BUILTINS, ids=lambda one: one.name)


def off_by(builtin: Builtin) -> float:
    """Return the curve's largest relative error at the lengths that it was not fitted to."""
    profile = builtin.profile()
    return max(abs(prefill_seconds(profile, one.tokens) / one.seconds - 1) for one in builtin.checks)


@every_profile
def test_the_curve_is_within_a_tenth_of_what_it_was_not_fitted_to(builtin):
    assert tuple(one.tokens for one in builtin.checks) == CHECKED_TOKENS
    assert not set(CHECKED_TOKENS) & {one.tokens for one in builtin.points}
    assert off_by(builtin) <= 0.1


@every_profile
def test_a_curve_of_other_hardware_fails_that_check(builtin):
    slower = tuple(PrefillTime(tokens=one.tokens, seconds=1.25 * one.seconds) for one in builtin.points)
    assert off_by(msgspec.structs.replace(builtin, points=slower)) > 0.1


@every_profile
def test_weights_and_a_long_cache_fit(builtin):
    total_bytes = builtin.devices * DEVICE_BYTES[builtin.device]
    assert builtin.weights_bytes + cache_bytes(builtin.profile(), 131_072) <= USABLE * total_bytes
    assert builtin.memory.total_bytes == total_bytes


@every_profile
def test_names_say_the_weights_and_the_hardware(builtin):
    assert builtin.name.endswith(f"-{builtin.precision}-{builtin.devices}x{builtin.device}")
    model = builtin.name.split(f"-{builtin.precision}-")[0]
    assert builtin.model.lower().startswith(model)
    if model in MODEL_CACHES:
        cache = MODEL_CACHES[model]
        assert (builtin.state_bytes, builtin.token_bytes) == (cache.state_bytes, cache.token_bytes)


@every_profile
def test_no_longer_prompt_and_no_larger_batch_takes_less(builtin):
    assert all(short.seconds < long.seconds for short, long in pairwise(builtin.points))
    assert all(small.seconds <= large.seconds for small, large in pairwise(builtin.decode_steps))


def test_the_models_whose_sizes_prfaas_knows_are_among_them():
    assert {"Qwen3.5-397B-A17B", "Qwen3.5-122B-A10B", "Kimi-K3"} <= {one.model for one in BUILTINS}


def test_what_is_assumed_says_so_and_the_rest_is_estimated():
    assert {one.name: one.source.split(":")[0] for one in BUILTINS if one.basis == "assumed"} == {
        "qwen3.5-397b-fp8-8xh20-141": "assumed"
    }


def test_steps_are_on_a_line_between_batches_and_unknown_beyond_the_largest():
    builtin = read_builtin("name", H200)
    known = {step.batch: step.seconds for step in builtin.decode_steps}
    assert builtin.step_seconds(32) == known[32]
    assert builtin.step_seconds(48) == pytest.approx((known[32] + known[64]) / 2)
    assert builtin.step_seconds(max(known) + 1) is None
    assert msgspec.structs.replace(builtin, decode_steps=()).step_seconds(1) is None


def test_a_batch_below_the_smallest_known_takes_as_long():
    builtin = read_builtin("name", H200)
    assert msgspec.structs.replace(builtin, decode_steps=builtin.decode_steps[2:]).step_seconds(1) == (
        builtin.decode_steps[2].seconds
    )


@pytest.mark.parametrize(
    ("name", "near"),
    [("qwen3.5-397b-fp8-8xh20", "8xh20-141"), ("qwen3.5-397B-fp8-8xH200", H200), ("", "qwen3.5"), ("../models", "")],
)
def test_an_unknown_name_is_answered_with_the_nearest(name, near):
    with pytest.raises(ConfigError, match=f"hub.pd.profile.builtin is '{name}'.*{near}.*prfaas profile list"):
        read_builtin("hub.pd.profile.builtin", name)
