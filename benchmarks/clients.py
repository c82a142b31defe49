"""Other projects' load generators against our gateway: each request has an answer, and what the gateway costs.

    prfaas bench clients [vllm guidellm aiperf] [-o json]

Once a release, and never in CI: the first run fetches 4 GB, most of it torch for guidellm. Two workers stand behind the
gateway, and every prompt is prefilled at the other one. The rival is the decode worker without a gateway.

`vllm bench serve` is that of the environment of `make test-vllm`, the other two are those of `prfaas bench outside`.
"""

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from benchmarks.outside.environments import ensure_tool, version_of
from benchmarks.report import Figure, run, say
from tests.vllm.gateways import gateway, table_of
from tests.vllm.workers import worker_processes

from prfaas.errors import ConfigError
from prfaas_sandbox.progress import progress
from prfaas_sandbox.vllm import ensure_vllm
from prfaas_worker.assets import model_directory

MODEL = "builtin:qwen3-next-tiny"
REQUESTS, STREAMS, PROMPT_TOKENS, ANSWER_TOKENS = 40, 4, 400, 64
SECONDS = 1800.0


class Load(NamedTuple):
    """What a generator reports: requests without a whole answer, and answered tokens a second."""

    failed: int
    tokens_per_second: float


def cached_tokenizer(folder: Path) -> str:
    """Put the model's tokenizer where `run_tool` has the cache of Hugging Face; return its name there."""
    repository, revision = folder / "hub" / "models--prfaas--tiny", "0" * 40
    shutil.copytree(model_directory(MODEL), repository / "snapshots" / revision)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(revision)
    return "prfaas/tiny"


def run_tool(command: list[str | Path], folder: Path) -> None:
    """Run a generator in a folder, silently unless it fails."""
    variables = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(folder), "VLLM_NO_USAGE_STATS": "1"}
    log = folder / "output.log"
    with log.open("wb") as output:
        done = subprocess.run(
            command, cwd=folder, env=os.environ | variables, stdout=output, stderr=output, timeout=SECONDS, check=False
        )
    if done.returncode:
        raise SystemExit(f"{command[0]} ended with {done.returncode}:\n{log.read_text(errors='replace')[-3000:]}")


def installed(tool: str) -> Path:
    with progress() as report:
        return ensure_tool(tool, report) / tool


def load_vllm(url: str, folder: Path) -> Load:
    with progress() as report:
        program = ensure_vllm(report).with_name("vllm")
    command: list[str | Path] = [program, "bench", "serve", "--backend", "openai-chat", "--base-url", url]
    command += ["--endpoint", "/v1/chat/completions", "--model", "tiny", "--tokenizer", model_directory(MODEL)]
    command += ["--dataset-name", "random", "--random-input-len", str(PROMPT_TOKENS), "--ignore-eos"]
    command += ["--random-output-len", str(ANSWER_TOKENS), "--num-prompts", str(REQUESTS), "--max-concurrency"]
    run_tool([*command, str(STREAMS), "--save-result", "--result-dir", folder, "--result-filename", "r.json"], folder)
    found = json.loads((folder / "r.json").read_text())
    return Load(REQUESTS - found["completed"], found["output_throughput"])


def load_guidellm(url: str, folder: Path) -> Load:
    command = [installed("guidellm"), "run", "--backend", f"kind=openai_http,target={url},model=tiny,http2=false"]
    command += ["--tokenizer", f"kind=huggingface_auto,model={model_directory(MODEL)}", "--disable-console"]
    command += ["--data", f"kind=synthetic_text,prompt_tokens={PROMPT_TOKENS},output_tokens={ANSWER_TOKENS}"]
    command += [
        "--profile",
        f"kind=concurrent,streams={STREAMS}",
        "--constraint",
        f"kind=max_requests,count={REQUESTS}",
    ]
    run_tool([*command, "--output", f"kind=json,path={folder / 'r.json'}"], folder)
    metrics = json.loads((folder / "r.json").read_text())["benchmarks"][0]["metrics"]
    failed = REQUESTS - metrics["request_totals"]["successful"]
    return Load(failed, metrics["output_tokens_per_second"]["successful"]["mean"])


def load_aiperf(url: str, folder: Path) -> Load:
    command = [installed("aiperf"), "profile", "--url", url, "--model", "tiny", "--tokenizer", cached_tokenizer(folder)]
    command += ["--endpoint-type", "chat", "--streaming", "--concurrency", str(STREAMS), "--ui", "none"]
    command += ["--request-count", str(REQUESTS), "--isl", str(PROMPT_TOKENS), "--osl", str(ANSWER_TOKENS)]
    run_tool([*command, "--extra-inputs", '{"ignore_eos": true}', "--artifact-dir", folder], folder)
    found: dict[str, Any] = json.loads((folder / "profile_export_aiperf.json").read_text())
    return Load(REQUESTS - int(found["request_count"]["avg"]), found["output_token_throughput"]["avg"])


TOOLS = {"vllm": load_vllm, "guidellm": load_guidellm, "aiperf": load_aiperf}
Chosen = Annotated[list[str] | None, typer.Argument(help=f"Some of {', '.join(TOOLS)}; all when left out.")]


def figures(tools: Chosen = None) -> Iterator[Figure]:
    if unknown := set(tools or ()) - set(TOOLS):
        raise ConfigError(f"no load generator is called {min(unknown)}: want some of {', '.join(TOOLS)}")
    for name in tools or TOOLS:
        with tempfile.TemporaryDirectory() as made, worker_processes(MODEL, Path(made)) as start:
            source, destination = (worker.wait_ready() for worker in (start(), start()))
            with gateway(Path(made), table_of("prfaas", source.url, destination.url)) as (url, _):
                found: list[Load] = []
                for target in (destination.url, url):
                    say(f"{name}: {REQUESTS} requests to {target}")
                    found.append(TOOLS[name](target, Path(tempfile.mkdtemp(dir=made))))
        alone, behind = found
        label = f"{name} {version_of(name)}".strip()
        yield Figure(name=f"{label}: failed requests", value=behind.failed, unit="requests", reach=0)
        rival = {"rival": "no gateway", "rival_value": alone.tokens_per_second}
        yield Figure(name=label, value=behind.tokens_per_second, unit="tokens/s", better="higher", **rival)


if __name__ == "__main__":
    run("clients", __doc__, figures)
