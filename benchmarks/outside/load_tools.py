"""guidellm, aiperf and `vllm bench serve`: how each replays a schedule of requests, and what it says of the answers.

Each is given the moments and lengths of the same requests. It starts them at their times, however many wait, and its
own figures are taken as it reports them. aiperf gets whole prompts. The others write prompts of these lengths: vLLM of
tokens at random, guidellm of words whose letters are the tokens.
"""

import itertools
import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from benchmarks.clients import MODEL as TOKENIZER
from benchmarks.clients import cached_tokenizer
from benchmarks.outside.environments import ensure_tool, version_of

from prfaas.processes import ends_with_us
from prfaas.simulate.arrivals import MOONCAKE_BLOCK_TOKENS
from prfaas.simulate.request import Arrival
from prfaas_sandbox.evaluate.objects import MODEL
from prfaas_sandbox.processes import Command, run_logged
from prfaas_sandbox.progress import OnProgress
from prfaas_sandbox.vllm import ensure_vllm
from prfaas_worker.assets import model_directory

SECONDS: Final = 900.0
RESULT: Final = "result.json"


class Seen(NamedTuple):
    """What a load maker saw: of the answers, the mean and 90th percentile of the time to the first token."""

    answered: int
    mean_seconds: float
    p90_seconds: float
    requests_per_second: float


class Target(NamedTuple):
    """Who is asked how often, and the folder with the schedule, in which the result is left."""

    url: str
    requests: int
    folder: Path

    @property
    def schedule(self) -> Path:
        return self.folder / "schedule.jsonl"


class LoadTool(NamedTuple):
    """How a tool is installed, called and read. `is_verbatim` is one that sends the prompts that it is given."""

    program: Callable[[OnProgress], Path]
    words: Callable[[Target], list[str | Path]]
    read: Callable[[Any], Seen]
    is_verbatim: bool = False


def vllm_words(target: Target) -> list[str | Path]:
    words: list[str | Path] = ["bench", "serve", "--backend", "openai", "--base-url", target.url]
    words += ["--endpoint", "/v1/completions", "--model", MODEL, "--tokenizer", model_directory(TOKENIZER)]
    words += ["--dataset-name", "timed_trace", "--dataset-path", target.schedule]
    words += ["--timed-trace-chunk-hash-size", str(MOONCAKE_BLOCK_TOKENS), "--timed-trace-sec-multiplier", "0.001"]
    words += ["--num-prompts", str(target.requests), "--percentile-metrics", "ttft", "--metric-percentiles", "90"]
    return [*words, "--disable-tqdm", "--save-result", "--result-dir", target.folder, "--result-filename", RESULT]


def read_vllm(found: Any) -> Seen:
    mean, p90 = (found[f"{name}_ttft_ms"] / 1000 for name in ("mean", "p90"))
    return Seen(found["completed"], mean, p90, found["request_throughput"])


def guidellm_words(target: Target) -> list[str | Path]:
    backend = f"kind=openai_http,target={target.url},model={MODEL},http2=false,request_format=/v1/completions"
    words: list[str | Path] = ["run", "--backend", backend, "--disable-console"]
    words += ["--tokenizer", f"kind=huggingface_auto,model={model_directory(TOKENIZER)}"]
    words += ["--data", f"kind=mooncake,source.kind=json_file,source.path={target.schedule}"]
    words += ["--profile", "kind=replay,schedule_turn=timestamp,time_scale=0.001"]  # it takes times for seconds
    return [*words, "--output", f"kind=json,path={target.folder / RESULT}"]


def read_guidellm(found: Any) -> Seen:
    metrics = found["benchmarks"][0]["metrics"]
    first = metrics["time_to_first_token_ms"]["successful"]
    rate = metrics["requests_per_second"]["successful"]["mean"]
    answered = metrics["request_totals"]["successful"]
    return Seen(answered, first["mean"] / 1000, first["percentiles"]["p90"] / 1000, rate)


def aiperf_words(target: Target) -> list[str | Path]:
    words: list[str | Path] = ["profile", "--url", target.url, "--model", MODEL, "--endpoint-type", "completions"]
    words += ["--streaming", "--tokenizer", cached_tokenizer(target.folder), "--input-file", target.schedule]
    words += ["--custom-dataset-type", "mooncake-trace", "--fixed-schedule", "--extra-inputs", '{"ignore_eos": true}']
    return [*words, "--ui", "none", "--artifact-dir", target.folder, "--profile-export-prefix", Path(RESULT).stem]


def read_aiperf(found: Any) -> Seen:
    mean, p90 = (found["time_to_first_token"][name] / 1000 for name in ("avg", "p90"))
    return Seen(int(found["request_count"]["avg"]), mean, p90, found["request_throughput"]["avg"])


LOAD_TOOLS: Final = {
    "guidellm": LoadTool(lambda report: ensure_tool("guidellm", report) / "guidellm", guidellm_words, read_guidellm),
    "aiperf": LoadTool(lambda report: ensure_tool("aiperf", report) / "aiperf", aiperf_words, read_aiperf, True),
    "vllm": LoadTool(lambda report: ensure_vllm(report).with_name("vllm"), vllm_words, read_vllm),
}
VARIABLES: Final = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "GUIDELLM__MAX_WORKER_PROCESSES": "1",  # of ten, which would take the cores from the instances
}


def label_of(tool: str) -> str:
    return f"{tool} {version_of(tool)}" if version_of(tool) else "vllm bench serve"


def schedule_lines(requests: Sequence[Arrival], is_verbatim: bool, rng: random.Random) -> list[str]:
    """Return the requests as lines of a Mooncake trace, in milliseconds, whose prompts share nothing. Its prompts are
    texts if `is_verbatim`."""
    names = itertools.count()

    def prompt_of(tokens: int) -> dict[str, Any]:
        if is_verbatim:
            return {"text_input": rng.randbytes(tokens // 2 + 1).hex()[:tokens]}
        blocks = -(-tokens // MOONCAKE_BLOCK_TOKENS)
        return {"input_length": tokens, "hash_ids": list(itertools.islice(names, blocks))}

    return [
        json.dumps(
            {"timestamp": 1000 * one.at_seconds, "output_length": one.output_tokens, **prompt_of(one.input_tokens)}
        )
        for one in requests
    ]


async def replay(name: str, program: Path, requests: Sequence[Arrival], url: str, folder: Path) -> Seen:
    """Have a tool send these requests, with an empty folder for what it leaves; errors as of `run_logged`."""
    tool, target = LOAD_TOOLS[name], Target(url, len(requests), folder)
    lines = schedule_lines(requests, tool.is_verbatim, random.Random(name))
    target.schedule.write_text("\n".join(lines) + "\n")
    words = [*ends_with_us(), program, *tool.words(target)]
    command = Command(words, name, {**VARIABLES, "HF_HOME": str(folder)}, folder, SECONDS)
    await run_logged(command, folder / "output.log", lambda _: None)
    return tool.read(json.loads((folder / RESULT).read_bytes()))
