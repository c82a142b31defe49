"""Reads what `vllm bench serve --save-result --save-detailed` recorded: lone prompts and their tokens' times.

Only requests that did not overlap tell what a prompt takes. A file says so by its limit, by the peak that it counted,
or by the times at which requests began. What one client alone has sent may overlap with another's: so repeats must
agree here, too.
"""

import statistics
from collections.abc import Sequence
from itertools import pairwise
from typing import Final

import msgspec

from prfaas.capacity.builtin import DecodeStep
from prfaas.capacity.profile import Sample
from prfaas.errors import ConfigError, ProtocolError
from prfaas.measure.answers import CacheBytes
from prfaas.measure.fit import Measurement, check_sound, fitted, repeated, times_of
from prfaas.util import decode_json

COMMAND: Final = (
    "vllm bench serve --base-url URL --model MODEL --dataset-name random --random-input-len N --random-output-len 64 "
    "--num-prompts 5 --max-concurrency 1 --seed N --save-result --save-detailed"
)
# Its random prompts of one seed begin alike at all lengths, and a cache of prefixes would help the longer ones.
_CURE: Final = f"record it, once for each of four lengths N or more and with another seed each time, with: {COMMAND}"
_MOST_TOKENS: Final = 1e8
_MOST_SECONDS: Final = 1e5
_MIN_STEP_TOKENS: Final = 8
_LEAST_SECONDS: Final = 1e-5
"""Of a prefill and a step: what is shorter failed, or was not counted."""


class BenchFile(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of a result file that are read."""

    model_id: str
    max_concurrency: int | None = None
    max_concurrent_requests: float | None = None
    input_lens: list[int] | None = None
    output_lens: list[int] = []
    ttfts: list[float] = []
    itls: list[list[float]] = []
    start_times: list[float] = []
    errors: list[str] = []


def read_bench_file(document: bytes, name: str) -> BenchFile:
    """Read a file; raises ConfigError for another one, for one without details, and where requests overlapped."""
    try:
        file = decode_json(document, BenchFile, name)
    except ProtocolError as error:
        raise ConfigError(f"{name} is no result of `vllm bench serve`: {error}; {_CURE}") from error
    if file.input_lens is None:
        raise ConfigError(f"{name} has no input_lens: it was saved without --save-detailed; {_CURE}")
    if len({len(file.input_lens), len(file.output_lens), len(file.ttfts), len(file.itls)}) != 1:
        raise ConfigError(f"{name} has input_lens, output_lens, ttfts and itls of different numbers of requests")
    for field, most, values in (
        ("input_lens", _MOST_TOKENS, file.input_lens),
        ("output_lens", _MOST_TOKENS, file.output_lens),
        ("ttfts", _MOST_SECONDS, file.ttfts),
        ("itls", _MOST_SECONDS, [seconds for one in file.itls for seconds in one]),
    ):
        if wrong := [value for value in values if not 0 <= value <= most]:
            raise ConfigError(f"{name} has {wrong[0]:g} in {field}, which must lie between 0 and {most:g}; {_CURE}")
    if not file.model_id.isprintable():
        raise ConfigError(f"{name} has a model_id that cannot be printed; {_CURE}")
    if not _is_one_by_one(file):
        raise ConfigError(f"the requests in {name} overlap, so their times hold each other's work; {_CURE}")
    return file


def measured(files: Sequence[BenchFile], source: str, cache: CacheBytes) -> Measurement:
    """Return what the files measured together. Raises ConfigError for another model or too few lengths."""
    models = {file.model_id for file in files}
    if len(models) > 1:
        raise ConfigError(f"the files are of several models: {', '.join(sorted(models))}; give those of one")
    samples: list[Sample] = []
    steps: list[float] = []
    contexts: list[int] = []
    for file in files:
        for place, tokens in enumerate(file.input_lens or ()):
            if tokens < 1 or file.ttfts[place] < _LEAST_SECONDS or "".join(file.errors[place : place + 1]):
                continue
            samples.append(Sample(tokens, file.ttfts[place]))
            answered, seconds = file.output_lens[place] - 1, sum(file.itls[place])
            if answered >= _MIN_STEP_TOKENS and seconds >= _LEAST_SECONDS * answered:
                steps.append(seconds / answered)
                contexts.append(tokens + answered // 2)
    samples = repeated(samples)
    profile = fitted(samples, cache)
    lengths = times_of(samples, profile)
    if len(lengths) < 2:
        raise ConfigError(
            f"of {len(lengths)} lengths there are two prompts or more, and a curve needs at least two such; {_CURE}"
        )
    return Measurement(
        model=models.pop(),
        source=source,
        profile=profile,
        cache_source=cache.source,
        lengths=lengths,
        decode_context_tokens=round(statistics.median(contexts or [0])),
        decode_steps=(DecodeStep(batch=1, seconds=statistics.median(steps)),) if steps else (),
        notes=(*check_sound(lengths, ()), "decode steps of larger batches need `prfaas profile measure --url`"),
    )


def _is_one_by_one(file: BenchFile) -> bool:
    if file.max_concurrency == 1 or file.max_concurrent_requests == 1:
        return True
    if len(file.start_times) != len(file.ttfts):
        return False
    spans = sorted(
        (start, start + ttft + sum(itls))
        for start, ttft, itls in zip(file.start_times, file.ttfts, file.itls, strict=True)
    )
    return all(end <= start for (_, end), (start, _) in pairwise(spans))
