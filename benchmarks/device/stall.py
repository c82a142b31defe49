"""What a prefill's end costs vLLM's step on an accelerator: `prfaas bench vllm_stall`, which CPUs run by themselves."""

from functools import partial

from benchmarks import vllm_stall
from benchmarks.device.cases import Case


def cases(device: str) -> list[Case]:
    """Return the whole benchmark as a case that may be missing."""
    if device == "cpu":
        return []
    return [Case("stall", partial(vllm_stall.figures, device), is_must=False)]
