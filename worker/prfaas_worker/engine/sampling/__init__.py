"""Drawing tokens from logits, so that a sequence's text depends on nothing but its own logits, seed and place.

The random number of a draw is keyed by (seed, choice, position): not by batch, instance or history. A request that
goes on elsewhere from the same tokens draws the same text. A `Sampler` is one answer's state, `sample` a step's draws.
"""

from prfaas_worker.engine.sampling.batch import Drawn, sample
from prfaas_worker.engine.sampling.chance import uniform
from prfaas_worker.engine.sampling.sampler import Outputs, Sampler, check_tokens

__all__ = ["Drawn", "Outputs", "Sampler", "check_tokens", "sample", "uniform"]
