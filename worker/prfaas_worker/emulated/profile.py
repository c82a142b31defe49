"""Reads what an emulated engine takes its time from: a built-in profile, or a file.

A file is what `prfaas profile measure -o json` has written of a running server, or has the form of
`prfaas profile show NAME -o json`. A measurement knows the bytes of a cache, and not its layers. They are those of the
model if its name is a published model's, else three linear layers for each of attention, as such models mostly have.
"""

from collections.abc import Collection
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from prfaas.capacity.builtin import Builtin, builtin_names, read_builtin
from prfaas.capacity.models import MODEL_CACHES
from prfaas.capacity.profile import prefill_seconds
from prfaas.errors import UNREADABLE, ConfigError
from prfaas.measure.answers import known_model
from prfaas.measure.curve import PrefillTimes
from prfaas.measure.fit import Measurement
from prfaas.measure.steps import StepTimes

_LAYERS: Final = (12, 36)
"""Of attention and linear ones, where the model is not known: as many as Qwen3-Next has."""
_MOST_SECONDS: Final = 86_400.0
_FORMS: Final = "give what `prfaas profile measure -o json` has written, or `prfaas profile show NAME -o json`"


class EmulatedProfile(NamedTuple):
    """The times of an instance, and its cache. Instances of one `model` exchange caches, on whatever hardware."""

    name: str
    model: str
    times: StepTimes
    layers: tuple[int, int]
    """Of attention, and linear ones."""
    in_order: bool = False
    """Whether prompts are computed in order of arrival, as by the engine that was measured."""


def read_profile(name: str) -> EmulatedProfile:
    """Read a profile by its name, or from a file. Raises ConfigError if no engine can be emulated by it."""
    is_file = name not in builtin_names() and Path(name).is_file()
    read, lengths = _read_file(Path(name)) if is_file else _of_builtin(read_builtin("--emulate", name))
    if why := _why_unusable(read, set(lengths)):
        raise ConfigError(f"--emulate {name}: {why}")
    return read


def _read_file(path: Path) -> tuple[EmulatedProfile, Collection[int]]:
    try:
        document = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
        if "lengths" in document:
            return _of_measurement(msgspec.convert(document, Measurement))
        known = msgspec.convert(document, Builtin)
    except (OSError, *UNREADABLE) as error:
        raise ConfigError(f"--emulate {path} cannot be read: {error}; {_FORMS}") from error
    if not any(known.name.startswith(f"{model}-") for model in MODEL_CACHES):
        raise ConfigError(f"--emulate {path}: its name must begin with one of {', '.join(MODEL_CACHES)}, and a hyphen")
    return _of_builtin(known)


def _of_builtin(known: Builtin) -> tuple[EmulatedProfile, Collection[int]]:
    shape = MODEL_CACHES[known.cache_model]
    layers = shape.attention_layers, shape.linear_layers
    times = StepTimes(PrefillTimes(known.profile()), known.decode_steps)
    read = EmulatedProfile(known.name, known.cache_model, times, layers)
    return read, [point.tokens for point in known.points]


def _of_measurement(found: Measurement) -> tuple[EmulatedProfile, Collection[int]]:
    model = known_model(found.model, found.cache_source.removeprefix("model ")) or found.model
    shape = MODEL_CACHES.get(model)
    attention, linear = (shape.attention_layers, shape.linear_layers) if shape else _LAYERS
    layers = min(attention, found.profile.token_bytes), min(linear, found.profile.state_bytes)
    read = EmulatedProfile(found.model, model, found.times, layers, found.in_order)
    return read, [one.tokens for one in found.lengths]


def _why_unusable(read: EmulatedProfile, lengths: Collection[int]) -> str:
    """Return what is missing or absurd, as a sentence's part; empty if nothing is."""
    curve, steps = read.times.prefill.profile, read.times.decode_steps
    if len(lengths) < 2:
        return f"it knows fewer than two lengths of prompts; {_FORMS}"
    if not steps:
        return "the profile has no decode step; measure one with `prfaas profile measure --url`, or take one that has"
    if steps[0].batch < 1 or any(low.batch >= high.batch for low, high in pairwise(steps)):
        return f"its decode steps must be of one sequence or more, and each of more than the one before; {_FORMS}"
    seconds = [prefill_seconds(curve, tokens) for tokens in (1, max(lengths))]
    beside = read.times.beside_decodes.points if read.times.beside_decodes else ()
    seconds += [one.seconds for one in (*read.times.prefill.points, *beside, *steps)]
    if min(curve.fixed_seconds, curve.token_seconds, curve.squared_seconds) < 0 or not all(
        0 < one <= _MOST_SECONDS for one in seconds
    ):
        return f"each of its times must be more than 0 and at most {_MOST_SECONDS:g} s; {_FORMS}"
    if curve.token_bytes < 1 or curve.state_bytes < 0:
        return f"its cache has {curve.token_bytes} bytes for each token, and {curve.state_bytes} beside them; {_FORMS}"
    return ""
