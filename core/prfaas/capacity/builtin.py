"""The profiles that ship with prfaas: published models on today's hardware, by name.

    qwen3.5-397b-fp8-8xh200    model, precision of the weights, devices of an instance

Each is a file in profiles/, written by benchmarks/profiles/generate.py. An outside tool estimates its figures from
kernels that were measured on the device: seconds of a prefill that has the instance to itself, and seconds of a decode
step by batch. Nothing of that tool is needed to use them. `checks` are prefills of other lengths, by the same tool.
The curve never sees them, and a test holds it to them. None is measured on an instance: `basis` says what it rests on.
"""

import difflib
from collections.abc import Sequence
from functools import cache
from importlib import resources
from importlib.resources.abc import Traversable
from itertools import pairwise
from typing import Literal

import msgspec

from prfaas.capacity.memory import InstanceMemory
from prfaas.capacity.models import MODEL_CACHES
from prfaas.capacity.profile import Curve, Sample
from prfaas.errors import ConfigError
from prfaas.wire.profile import Profile

_SUFFIX = ".json"


class PrefillTime(msgspec.Struct, frozen=True, kw_only=True):
    """The seconds of a prefill of `tokens`, with nothing of them cached."""

    tokens: int
    seconds: float


class DecodeStep(msgspec.Struct, frozen=True, kw_only=True):
    """The seconds of a decode step of `batch` requests."""

    batch: int
    seconds: float


class Builtin(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of an instance of `devices` that serves a model. `source` says by whom, or what is assumed."""

    name: str
    model: str
    precision: str
    """Of the weights. Caches are in bf16, and states in fp32."""
    device: str
    devices: int
    parallelism: str
    source: str
    basis: Literal["estimated", "assumed"]
    """Estimated from measured kernels of this device, or assumed from another one's."""
    note: str = ""
    """What was left out, and why."""
    weights_bytes: int
    state_bytes: int
    token_bytes: int
    points: tuple[PrefillTime, ...]
    checks: tuple[PrefillTime, ...]
    context_tokens: int
    """Length of the prompts that a decode step reads."""
    decode_steps: tuple[DecodeStep, ...]

    @property
    def cache_model(self) -> str:
        """The name of the model in MODEL_CACHES."""
        return next(model for model in MODEL_CACHES if self.name.startswith(f"{model}-"))

    def profile(self) -> Profile:
        """Return the curve through the points."""
        return _fitted(self)

    def step_seconds(self, batch: int) -> float | None:
        return step_seconds(self.decode_steps, batch)

    @property
    def memory(self) -> InstanceMemory:
        return InstanceMemory(
            device=self.device,
            devices=self.devices,
            weights_bytes=self.weights_bytes,
            row_copies=MODEL_CACHES[self.cache_model].row_copies(self.devices),
        )


def step_seconds(steps: Sequence[DecodeStep], batch: int) -> float | None:
    """Return the seconds of a decode step, between batches on a line; None beyond what is known."""
    if not steps or batch > steps[-1].batch:
        return None
    for low, high in pairwise(steps):
        if low.batch < batch <= high.batch:
            share = (batch - low.batch) / (high.batch - low.batch)
            return low.seconds + share * (high.seconds - low.seconds)
    return steps[0].seconds


@cache
def _fitted(builtin: Builtin) -> Profile:
    samples = [Sample(point.tokens, point.seconds) for point in builtin.points]
    return Curve.fitted(samples).profile(builtin.state_bytes, builtin.token_bytes)


def all_builtins() -> tuple[Builtin, ...]:
    """Return all built-in profiles, by name."""
    return tuple(_read(name) for name in builtin_names())


@cache
def builtin_names() -> tuple[str, ...]:
    """Return the names of all built-in profiles, sorted."""
    return tuple(sorted(file.name.removesuffix(_SUFFIX) for file in _folder().iterdir() if file.name.endswith(_SUFFIX)))


def read_builtin(where: str, name: str) -> Builtin:
    """Return a built-in profile. Raises ConfigError, which names the nearest ones, if `where` names none."""
    if name not in builtin_names():
        longer = [known for known in builtin_names() if name and known.startswith(name)]
        near = longer[:3] or difflib.get_close_matches(name, builtin_names(), 3, 0.0)
        raise ConfigError(
            f"{where} is {name!r}, which is no built-in profile; near it are {', '.join(near)}; "
            "`prfaas profile list` shows all"
        )
    return _read(name)


@cache
def _read(name: str) -> Builtin:
    return msgspec.json.decode((_folder() / f"{name}{_SUFFIX}").read_bytes(), type=Builtin)


def _folder() -> Traversable:
    return resources.files("prfaas.capacity") / "profiles"
