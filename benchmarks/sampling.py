"""What drawing a step's tokens costs: the batched draw beside one that goes row by row and sorts every vocabulary.

    prfaas bench sampling

Logits fall with the rank r of a token as -s log r, shuffled. At temperature 0.8 five tokens gather 0.95 of a sure model
(s = 2), 218 of an undecided one (1.2), most of the vocabulary of a flat one (0.1). The figure is the median; what takes
long is done once.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import torch
from benchmarks.report import Figure, run

from prfaas.wire.engine import Generate, Sampling, TokenLogprob
from prfaas_worker.engine.sampling import Outputs, Sampler, sample, uniform

SMALL, LARGE = 264, 163_840
REACH_GREEDY_MS = 0.1  # 16 greedy rows of the byte tokenizer's vocabulary
RIVAL = "row by row, sorted"
GREEDY = Sampling(0.0, 1.0, 0, 1)
PLAIN = Sampling(0.8, 1.0, 0, 1)
NUCLEUS = Sampling(0.8, 0.95, 0, 1)
CUT = Sampling(0.8, 0.95, 50, 1)
PENALISED = Sampling(0.0, 1.0, 0, 1, repetition_penalty=1.1, frequency_penalty=0.2)


class Case(NamedTuple):
    name: str
    rows: int
    width: int
    sampling: Sampling
    slope: float = 2.0
    logprobs: int = -1


def row_by_row(logits: torch.Tensor, samplings: list[Sampling], position: int, alternatives: int) -> list[int]:
    """Draw as one would write it first: a float64 softmax and a stable sort of each row."""
    greedy = torch.argmax(logits, dim=-1).tolist()
    tokens = []
    for row, sampling in enumerate(samplings):
        if sampling.temperature == 0:
            token = greedy[row]
        else:
            scaled = (logits[row].double() - logits[row].max()) / sampling.temperature
            probabilities, ids = torch.softmax(scaled, dim=-1).sort(descending=True, stable=True)
            if sampling.top_k:
                probabilities = probabilities[: sampling.top_k]
            cumulative = probabilities.cumsum(dim=-1)
            kept = int(((cumulative - probabilities) < sampling.top_p * cumulative[-1]).sum())
            target = uniform(sampling.seed, row, position) * cumulative[kept - 1]
            token = int(ids[min(int(torch.searchsorted(cumulative[:kept], target, right=True)), kept - 1)])
        if alternatives >= 0:
            logprobs = torch.log_softmax(logits[row], dim=-1)
            values, top = logprobs.topk(alternatives)
            TokenLogprob(float(logprobs[token]), list(zip(top.tolist(), values.tolist(), strict=True)))
        tokens.append(token)
    return tokens


def make_logits(rows: int, width: int, slope: float) -> torch.Tensor:
    generator = np.random.default_rng(0)
    ranked = -slope * np.log(np.arange(1, width + 1))
    return torch.from_numpy(np.stack([generator.permutation(ranked) for _ in range(rows)]).astype(np.float32))


def request(sampling: Sampling, logprobs: int, prompt_tokens: int = 1) -> Generate:
    prompt = [token % SMALL for token in range(prompt_tokens)]
    return Generate(1, "r", prompt, 1, 1 << 20, sampling, logprobs, "", ignore_eos=True)


def median_ms(call: Callable[[], object], seconds: float) -> float:
    """Call for so long; what takes longer than that once is called once."""
    times: list[float] = []
    while sum(times) < seconds and len(times) < 2000:
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return statistics.median(times) * 1000


def measure(case: Case) -> Figure:
    logits = make_logits(case.rows, case.width, case.slope)
    model = Outputs(case.width, ())
    samplers = [Sampler(request(case.sampling, case.logprobs), row, model) for row in range(case.rows)]
    ours = median_ms(lambda: sample(logits, samplers), 0.4)
    theirs = median_ms(lambda: row_by_row(logits, [case.sampling] * case.rows, 7, case.logprobs), 0.4)
    name = f"{case.name}, {case.rows} of {case.width:,}"
    reach = REACH_GREEDY_MS if name == f"greedy, 16 of {SMALL}" else None
    return Figure(name=name, value=ours, unit="ms", reach=reach, rival=RIVAL, rival_value=theirs)


def penalties() -> Figure:
    """The step after 32,000 tokens, of which each counts, beside the same without penalties."""
    logits, model = make_logits(16, LARGE, 2.0), Outputs(LARGE, ())
    generated = [token % 4000 for token in range(32_000)]
    penalised = [Sampler(request(PENALISED, -1, 1000), row, model, generated) for row in range(16)]
    plain = [Sampler(request(GREEDY, -1), row, model) for row in range(16)]
    ours = median_ms(lambda: sample(logits.clone(), penalised), 0.4)
    theirs = median_ms(lambda: sample(logits.clone(), plain), 0.4)
    rival = "without"
    return Figure(name=f"penalties, 16 of {LARGE:,}", value=ours, unit="ms", rival=rival, rival_value=theirs)


@torch.inference_mode()
def figures() -> Iterator[Figure]:
    """Measure everything."""
    for width in (SMALL, LARGE):
        for rows in (1, 16, 64):
            yield measure(Case("greedy", rows, width, GREEDY))
            yield measure(Case("temperature", rows, width, PLAIN))
            yield measure(Case("top_k 50, top_p 0.95", rows, width, CUT))
    yield measure(Case("top_p 0.95, sure", 16, LARGE, NUCLEUS))
    yield measure(Case("top_p 0.95, undecided", 16, LARGE, NUCLEUS, slope=1.2))
    yield measure(Case("top_p 0.95, flat", 4, LARGE, NUCLEUS, slope=0.1))
    yield measure(Case("greedy, 5 logprobs", 16, LARGE, GREEDY, logprobs=5))
    yield penalties()


if __name__ == "__main__":
    run("sampling", __doc__, figures)
