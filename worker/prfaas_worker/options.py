"""The flags of `prfaas-worker`, checked before anything starts. The engine process gets them as they are."""

import os
from collections.abc import Sequence
from itertools import combinations
from typing import Annotated, Any, Literal

import msgspec
import typer

from prfaas.console import LogFormatOption, ip_address, port_option, read_options, refuse, seconds_up_to, whole_number
from prfaas.errors import ConfigError
from prfaas.names import WORKER_ADMIN_PORT, WORKER_API_PORT, WORKER_DATA_PORT
from prfaas.routing.compression import WireCodec
from prfaas.schedule import RUNNING, slots_for
from prfaas.wire.engine import Role

Device = Literal["auto", "cpu", "cuda"]
Dtype = Literal["auto", "float32", "bfloat16"]

WAITING_PER_RUNNING = 8
"""Requests that may wait for each one that may run; beyond that the worker answers that it is overloaded."""
MAX_PROFILE_SECONDS = 600
MAX_LOAD_SECONDS = 86_400

HELP = """Serve one replica of a model: OpenAI API, Prefill-as-a-Service API and the data port.

\b
Example:
  prfaas-worker --model-source builtin:kimi-linear-tiny --model-name kimi-linear-tiny --role decode
"""


def _count(help_text: str, *names: str, low: int = 1, shown: str | bool = True) -> Any:
    """Return the option of a whole number from `low`; `shown` is what the help says of its default."""
    return typer.Option(*names, parser=whole_number(low), metavar="N", help=help_text, show_default=shown)


def _factor(value: str | float) -> float:
    """Parse a factor of times."""
    try:
        factor = float(value)
    except ValueError:
        factor = 0.0
    if not 0 < factor < float("inf"):
        raise typer.BadParameter(f"{value!r} is not a number above 0")
    return factor


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """One worker's configuration. `max_context_tokens`, `threads` and `step_tokens` 0 leave the choice to model, torch
    and a measurement. `profile_seconds` 0 means none. Without `emulate` the engine computes."""

    model_source: Annotated[
        str, typer.Option(metavar="DIR|builtin:NAME", help="Model directory, or a model of the package.")
    ]
    model_name: Annotated[str, typer.Option(metavar="NAME", help="Name of the model in requests.")]
    host: Annotated[str, typer.Option(parser=ip_address, metavar="IP", help="Address of all ports.")] = "127.0.0.1"
    api_port: Annotated[int, port_option("HTTP port.")] = WORKER_API_PORT
    data_port: Annotated[int, port_option("Port of cache transfers.")] = WORKER_DATA_PORT
    admin_port: Annotated[
        int, port_option("Port of probes and /metrics, never inside TLS; 0: any free one.", low=0)
    ] = WORKER_ADMIN_PORT
    instance: Annotated[
        str, typer.Option(metavar="NAME", help="Name of this replica: its pod's.", show_default="host name")
    ] = os.uname().nodename
    cluster: Annotated[str, typer.Option(metavar="NAME", help="The cluster that the worker runs in.")] = "hub"
    pool: Annotated[str, typer.Option(metavar="NAME", help="The pool that the worker belongs to.")] = ""
    role: Annotated[Role, typer.Option(help="Requests that its steps favour.")] = "mixed"
    drain_seconds: Annotated[int, _count("Time to finish after SIGTERM.", low=0)] = 30
    device: Annotated[
        Device, typer.Option(help="Device of the model; auto is a GPU that can run it, else the CPU.")
    ] = "auto"
    dtype: Annotated[
        Dtype, typer.Option(help="Type of matrix products; auto is float32 on a CPU and bfloat16 on a GPU.")
    ] = "auto"
    threads: Annotated[int, _count("Threads of torch.", shown="all cores")] = 0
    max_context_tokens: Annotated[int, _count("Longest sequence.", "--max-context", shown="the model's")] = 0
    max_running: Annotated[
        int, _count("Sequences that decode at once; as many again have slots, for prompts and caches that leave.")
    ] = RUNNING
    step_tokens: Annotated[
        int,
        _count("Most tokens of a step; twice as many with the role prefill.", shown="measured at the start, else 1024"),
    ] = 0
    cache_mib: Annotated[
        int,
        _count(
            "Memory for the cache: pages, and the states of sequences.",
            shown="1024; on a GPU nine tenths of what the weights leave",
        ),
    ] = 0
    tls_dir: Annotated[
        str,
        typer.Option(
            metavar="DIR",
            show_default="plain",
            help="Serve API and data port inside TLS with DIR's tls.crt, tls.key and ca.crt; reread when they change.",
        ),
    ] = ""
    profile_seconds: Annotated[
        float,
        typer.Option(
            parser=seconds_up_to(MAX_PROFILE_SECONDS),
            metavar="N",
            help="Time to measure steps and prefills before serving; 0: learn only from requests.",
        ),
    ] = 1.0
    egress_mbps: Annotated[
        int,
        _count(
            "Most Mbit/s to send to other instances, over all connections; 0: no cap. PUT /v1/egress changes it.", low=0
        ),
    ] = 0
    egress_file: Annotated[
        str,
        typer.Option(
            metavar="FILE", show_default="nowhere", help="Read --egress-mbps here while the file exists; it may change."
        ),
    ] = ""
    transfer_memory_mib: Annotated[int, _count("Memory of cache transfers beside the cache.")] = 256
    wire_codec: Annotated[
        WireCodec,
        typer.Option(
            help="Compression of transfers: auto is lossless, or none where it does not pay on the link; int8 changes "
            "answers a little."
        ),
    ] = "auto"
    emulate: Annotated[
        str,
        typer.Option(
            metavar="PROFILE",
            show_default="compute",
            help="Compute nothing, and take the time of a profile instead: a built-in one, or a file that `prfaas "
            "profile measure -o json` has written.",
        ),
    ] = ""
    cache_scale: Annotated[int, _count("Divide the bytes of an emulated cache.")] = 1
    stretch: Annotated[
        float, typer.Option(parser=_factor, metavar="X", help="Multiply the times of an emulated engine.")
    ] = 1.0
    load_seconds: Annotated[
        float,
        typer.Option(
            parser=seconds_up_to(MAX_LOAD_SECONDS), metavar="N", help="Time that an emulated engine takes to load."
        ),
    ] = 0.0
    log_format: LogFormatOption = "text"

    @property
    def place(self) -> str:
        return "/".join(part for part in (self.cluster, self.pool, self.instance) if part) + f" {self.role}"

    @property
    def slots(self) -> int:
        """Sequences that have a state slot at once."""
        return slots_for(self.max_running)

    @property
    def max_waiting(self) -> int:
        """Limit of waiting requests, and likewise of waiting prefills for others."""
        return WAITING_PER_RUNNING * self.max_running


def parse(arguments: Sequence[str] | None = None) -> Options:
    """Read the command line. A bad flag ends the process with exit code 2 and a message, --help with 0."""
    options = read_options(Options, "prfaas-worker", HELP, arguments)
    ports = {"--api-port": options.api_port, "--data-port": options.data_port, "--admin-port": options.admin_port}
    for one, other in combinations(ports, 2):
        if ports[one] == ports[other]:
            refuse("prfaas-worker", f"{one} and {other} are both {ports[one]}; give two different ports")
    if options.emulate:
        _check_emulation(options)
    elif (options.cache_scale, options.stretch, options.load_seconds) != (1, 1.0, 0.0):
        refuse("prfaas-worker", "--cache-scale, --stretch and --load-seconds are of an emulated engine: give --emulate")
    return options


def _check_emulation(options: Options) -> None:
    from prfaas_worker.emulated.instance import EmulatedInstance  # here: other workers need no profiles
    from prfaas_worker.emulated.profile import read_profile

    try:
        instance = EmulatedInstance(read_profile(options.emulate), options.cache_scale, options.stretch)
        instance.check_reach(options.max_context_tokens, options.max_running)
    except ConfigError as error:
        refuse("prfaas-worker", str(error))
    if options.wire_codec not in {"auto", "none"}:
        refuse("prfaas-worker", f"--wire-codec {options.wire_codec}: an emulated cache has no content to compress")
