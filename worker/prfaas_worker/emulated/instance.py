"""What an emulated engine takes from a profile: how long its steps last, and the shape of its cache.

The profile is a built-in one, or a file in the form of `prfaas profile show NAME -o json`. A cache has as many layers
as the model's, each with the bytes of the profile, divided by a factor. Layers of both kinds are spread evenly.
"""

from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from prfaas.capacity.builtin import Builtin, builtin_names, read_builtin
from prfaas.capacity.models import MODEL_CACHES
from prfaas.capacity.profile import prefill_seconds
from prfaas.errors import UNREADABLE, ConfigError, InternalError
from prfaas_worker.cache_spec import LayerSpec, TensorSpec

_COVERED: Final = 2
"""Times the longest known prompt: as far as a fitted curve may be followed."""


class EmulatedInstance(NamedTuple):
    """An instance as its profile says, its times `stretch` times as long and its cache 1/`cache_scale` as large."""

    profile: Builtin
    cache_scale: int = 1
    stretch: float = 1.0

    @property
    def longest_tokens(self) -> int:
        """The longest prompt that the profile knows."""
        return self.profile.profile().max_tokens

    def chunk_seconds(self, start: int, tokens: int, *, is_first: bool) -> float:
        """Return the seconds of a prompt's next tokens behind `start`. What a prefill costs however short it is, its
        first chunk takes."""
        curve = self.profile.profile()
        if is_first:
            return self.stretch * prefill_seconds(curve, tokens, start)
        return self.stretch * (prefill_seconds(curve, start + tokens) - prefill_seconds(curve, start))

    def decode_seconds(self, batch: int) -> float:
        """Return the seconds in which a step decodes a token of each of `batch` sequences, at most of those known."""
        seconds = self.profile.step_seconds(batch) if batch else 0.0
        if seconds is None:
            raise InternalError(f"{self.profile.name} knows no decode step of {batch} sequences")
        return self.stretch * seconds

    def layers(self) -> tuple[LayerSpec, ...]:
        """Return the cache's layers. Raises ConfigError if too little is left of them."""
        shape = MODEL_CACHES[self.profile.cache_model]
        rows = self._scaled("row", self.profile.token_bytes / shape.attention_layers)
        state = self._scaled("state", self.profile.state_bytes / shape.linear_layers)
        attention = LayerSpec(rows=(TensorSpec("rows", ("token", "byte"), (rows,), "uint8"),))
        linear = LayerSpec(state=(TensorSpec("state", ("byte",), (state,), "uint8"),))
        count, kind = shape.attention_layers + shape.linear_layers, shape.attention_layers
        return tuple(
            attention if (index + 1) * kind // count > index * kind // count else linear for index in range(count)
        )

    def check_reach(self, max_context: int, max_running: int) -> None:
        """Raise ConfigError if the profile does not say what so long prompts and so many sequences at once take."""
        name, longest = self.profile.name, self.longest_tokens
        if max_context > _COVERED * longest:
            raise ConfigError(
                f"--max-context {max_context} is more than twice the {longest} tokens of the longest prompt that "
                f"{name} knows: give at most {_COVERED * longest}"
            )
        if max_running > (most := self.profile.decode_steps[-1].batch):
            raise ConfigError(
                f"--max-running {max_running} is more than the {most} sequences of the largest decode step that {name} "
                "knows: give at most those"
            )
        self.layers()

    def _scaled(self, what: str, nbytes: float) -> int:
        if nbytes < self.cache_scale:
            raise ConfigError(
                f"--cache-scale {self.cache_scale} leaves less than a byte of the {nbytes:.0f} of a layer's {what}: "
                f"give at most {int(nbytes)}"
            )
        return round(nbytes / self.cache_scale)


def read_instance(profile: str, cache_scale: int, stretch: float) -> EmulatedInstance:
    """Read a profile by its name, or from a file. Raises ConfigError if an engine cannot be emulated by it."""
    is_file = profile not in builtin_names() and Path(profile).is_file()
    known = _read_file(Path(profile)) if is_file else read_builtin("--emulate", profile)
    if not known.decode_steps:
        raise ConfigError(f"--emulate {profile}: the profile has no decode step; take one that has")
    return EmulatedInstance(known, cache_scale, stretch)


def _read_file(path: Path) -> Builtin:
    hint = "give the form of `prfaas profile show NAME -o json`"
    try:
        read = msgspec.json.decode(path.read_bytes(), type=Builtin)
    except (OSError, *UNREADABLE) as error:
        raise ConfigError(f"--emulate {path} cannot be read: {error}; {hint}") from error
    if not any(read.name.startswith(f"{model}-") for model in MODEL_CACHES):
        raise ConfigError(f"--emulate {path}: its name must begin with one of {', '.join(MODEL_CACHES)}, and a hyphen")
    if len({point.tokens for point in read.points}) < 2:
        raise ConfigError(f"--emulate {path} knows fewer than two lengths of prompts; {hint}")
    return read
