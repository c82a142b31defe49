"""Clean runs of `prfaas verify`: none may raise an alarm, and two small engines are verified within three minutes.

    prfaas bench verify [worker vllm nixl] [--runs 10] [--records FOLDER] [-o json]

Pairs: our worker, vLLM with our connector, vLLM with NixlConnector over TCP. Each run has new prompts. A run counts as
clean if its verdict is `proven`.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Annotated, Final, NamedTuple

import msgspec
import typer
from benchmarks.report import Figure, run, say
from tests.verify.attentive import make_attentive_model, make_attentive_qwen3_next
from tests.verify.pairs import worker_pair
from tests.vllm.connected import CONNECTOR
from tests.vllm.engines import EngineHost
from tests.vllm.servers import vllm_servers
from tests.vllm.test_nixl import CONNECTOR as NIXL
from tests.vllm.test_nixl import VARIABLES

from prfaas.cli.verify.record import Record
from prfaas.errors import ConfigError
from prfaas.ports import free_ports
from prfaas_sandbox.progress import progress
from prfaas_sandbox.vllm import ensure_vllm

REACH_SECONDS: Final = 180.0
DEVICE: Final = "2 cores of a CPU"
LINK: Final = "loopback"


class Pair(NamedTuple):
    """The URLs of a source and a destination, and the source's data port."""

    source: str
    destination: str
    data_port: int = 1


@contextmanager
def worker() -> Iterator[Pair]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with worker_pair(folder, make_attentive_model(folder / "model")) as (source, destination):
            yield Pair(source.url, destination.url, source.data_port)


@contextmanager
def vllm() -> Iterator[Pair]:
    ports = free_ports(2)
    configs = [json.dumps(CONNECTOR | {"kv_port": port}) for port in ports]
    flags = [("--kv-transfer-config", config, "--enable-prompt-tokens-details") for config in configs]
    with servers(flags, [{}, {}]) as urls:
        yield Pair(*urls, ports[0])


@contextmanager
def nixl() -> Iterator[Pair]:
    flags = [("--kv-transfer-config", json.dumps(NIXL))] * 2
    with servers(flags, [VARIABLES | {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(port)} for port in free_ports(2)]) as urls:
        yield Pair(*urls)


@contextmanager
def servers(flags: list[tuple[str, ...]], variables: list[dict[str, str]]) -> Iterator[list[str]]:
    """Run vLLM servers, and give their URLs once they are ready."""
    with progress() as report:
        python = ensure_vllm(report)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        host = EngineHost(python, Path(folder), make_attentive_qwen3_next(Path(folder) / "model"))
        stack.callback(host.close)
        start = stack.enter_context(vllm_servers(host))
        started = [start(*words, **values) for words, values in zip(flags, variables, strict=True)]
        yield [one.wait_ready().url for one in started]


PAIRS: Final[dict[str, Callable[[], AbstractContextManager[Pair]]]] = {"worker": worker, "vllm": vllm, "nixl": nixl}
Chosen = Annotated[list[str] | None, typer.Argument(help=f"Some of {', '.join(PAIRS)}; all when left out.")]
Runs = Annotated[int, typer.Option(min=1, help="Runs of each pair.")]
Records = Annotated[Path | None, typer.Option(help="Keep each pair's last record here.", show_default=False)]


def figures(pairs: Chosen = None, runs: Runs = 10, records: Records = None) -> Iterator[Figure]:
    if unknown := set(pairs or ()) - set(PAIRS):
        raise ConfigError(f"no pair is called {min(unknown)}: want some of {', '.join(PAIRS)}")
    for name in pairs or PAIRS:
        with PAIRS[name]() as pair:
            found = [verified(pair) for _ in range(runs)]
        if records is not None:
            document = msgspec.json.format(msgspec.json.encode(found[-1]), indent=2) + b"\n"
            (records / f"{name}.json").write_bytes(document)
        for record in found:
            for step in record.steps:
                if step.outcome in {"fails", "proves little"}:
                    say(f"{name}: {step.claim}: {step.seen}")
        alarms = sum(record.verdict != "proven" for record in found)
        yield Figure(name=f"{name}: false alarms in {runs} runs", value=alarms, unit="", reach=0)
        longest = max(record.seconds for record in found)
        yield Figure(name=f"{name}: the longest run", value=longest, unit="s", reach=REACH_SECONDS)


def verified(pair: Pair) -> Record:
    """Run the command on a pair."""
    command = [sys.executable, "-m", "prfaas.cli.main", "verify", "-o", "json", "--device", DEVICE, "--link", LINK]
    command += ["--prefill", pair.source, "--decode", pair.destination, "--data-port", str(pair.data_port)]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=False)
    return msgspec.json.decode(done.stdout, type=Record)


if __name__ == "__main__":
    run("verify", __doc__, figures)
