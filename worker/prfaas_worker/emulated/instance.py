"""What an emulated engine takes from a profile: how long its steps last, and the shape of its cache.

A cache has as many layers as the model's, which together have the bytes of the profile, divided by a factor. Layers of
both kinds are spread evenly.
"""

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from prfaas.errors import ConfigError
from prfaas.measure.steps import StepChunk
from prfaas_worker.cache_spec import LayerSpec, TensorSpec
from prfaas_worker.emulated.profile import EmulatedProfile

_COVERED: Final = 2
"""Times the longest known prompt: as far as a fitted curve may be followed."""


class EmulatedInstance(NamedTuple):
    """An instance as its profile says, its times `stretch` times as long and its cache 1/`cache_scale` as large."""

    profile: EmulatedProfile
    cache_scale: int = 1
    stretch: float = 1.0

    @property
    def longest_tokens(self) -> int:
        """The longest prompt that the profile knows."""
        return self.profile.times.prefill.longest_tokens

    def chunk_seconds(self, start: int, tokens: int, *, is_first: bool) -> float:
        """Return the seconds of a prompt's next tokens behind `start`."""
        return self.stretch * self.profile.times.prefill.chunk_seconds(start, tokens, is_first=is_first)

    def step_seconds(
        self, chunks: Sequence[StepChunk], batch: int, context_tokens: int, alone_tokens: int
    ) -> tuple[float, float]:
        """Return how long a step computes prompts, and how long it lasts; see `StepTimes`."""
        prefill_seconds, seconds = self.profile.times.step_seconds(chunks, batch, context_tokens, alone_tokens)
        return self.stretch * prefill_seconds, self.stretch * seconds

    @property
    def least_step_seconds(self) -> float:
        return self.stretch * self.profile.times.decode_steps[0].seconds

    def layers(self) -> tuple[LayerSpec, ...]:
        """Return the cache's layers. Raises ConfigError if too little is left of them."""
        attention_layers, linear_layers = self.profile.layers
        count, curve = attention_layers + linear_layers, self.profile.times.prefill.profile
        rows = self._scaled("row", curve.token_bytes, attention_layers)
        states = self._scaled("state", curve.state_bytes, linear_layers)
        return tuple(
            LayerSpec(rows=(TensorSpec("rows", ("token", "byte"), (next(rows),), "uint8"),))
            if (index + 1) * attention_layers // count > index * attention_layers // count
            else LayerSpec(state=(TensorSpec("state", ("byte",), (next(states),), "uint8"),))
            for index in range(count)
        )

    def check_reach(self, max_context: int, max_running: int) -> None:
        """Raise ConfigError if the profile does not say what so long prompts and so many sequences at once take."""
        name, longest = self.profile.name, self.longest_tokens
        if max_context > _COVERED * longest:
            raise ConfigError(
                f"--max-context {max_context} is more than twice the {longest} tokens of the longest prompt that "
                f"{name} knows: give at most {_COVERED * longest}"
            )
        if max_running > (most := self.profile.times.decode_steps[-1].batch):
            raise ConfigError(
                f"--max-running {max_running} is more than the {most} sequences of the largest decode step that {name} "
                "knows: give at most those"
            )
        self.layers()

    def _scaled(self, what: str, all_bytes: int, layers: int) -> Iterator[int]:
        """Return what each layer has of `all_bytes`. Rounded layer by layer, a row of few bytes would be far off."""
        if all_bytes < self.cache_scale * layers:
            each_bytes = all_bytes / layers
            raise ConfigError(
                f"--cache-scale {self.cache_scale} leaves less than a byte of the {each_bytes:.0f} of a layer's "
                f"{what}: give at most {int(each_bytes)}"
            )
        total = round(all_bytes / self.cache_scale)
        return ((layer + 1) * total // layers - layer * total // layers for layer in range(layers))
