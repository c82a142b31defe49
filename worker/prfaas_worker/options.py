"""The flags of `prfaas-worker`, checked before anything starts."""

import argparse
import ipaddress
import os
from collections.abc import Sequence
from typing import Literal, get_args

import msgspec

from prfaas.names import WORKER_API_PORT, WORKER_DATA_PORT
from prfaas.routing.compression import WireCodec
from prfaas.wire.engine import Role

Device = Literal["auto", "cpu", "cuda"]
Dtype = Literal["auto", "float32", "bfloat16"]

WAITING_PER_RUNNING = 8
"""Requests that may wait for each one that may run; beyond that the worker says it is overloaded."""
MAX_PROFILE_SECONDS = 600


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """One worker's configuration. `max_context_tokens` 0 and `threads` 0 leave the choice to model and torch.

    `kv_events_port` and `profile_seconds` 0 mean none.
    """

    model_source: str
    model_name: str
    host: str
    api_port: int
    data_port: int
    instance: str
    cluster: str
    pool: str
    role: Role
    drain_seconds: int
    threads: int
    max_context_tokens: int
    max_running: int
    cache_mib: int
    host_cache_mib: int = 0
    disk_cache: str = ""
    disk_cache_mib: int = 4096
    device: Device = "auto"
    dtype: Dtype = "auto"
    compile: tuple[tuple[int, int], ...] = ()
    """Decode steps to compile: sequences, and tokens of each."""
    tls_dir: str = ""
    kv_events_port: int = 0
    profile_seconds: float = 1.0
    egress_mbps: int = 0
    """Most that data connections send together; 0 is no cap."""
    egress_file: str = ""
    """A file that says the same, and may change."""
    transfer_memory_mib: int = 256
    wire_codec: WireCodec = "auto"

    @property
    def max_waiting(self) -> int:
        """Requests, and likewise prefills for others, that may wait."""
        return WAITING_PER_RUNNING * self.max_running


def parse(arguments: Sequence[str] | None = None) -> Options:
    """Read the command line. A bad flag ends the process with exit code 2 and a sentence, --help with 0."""
    parser = _parser()
    given = parser.parse_args(arguments)
    if given.api_port == given.data_port:
        parser.error(f"--api-port and --data-port are both {given.api_port}; give two different ports")
    events = given.kv_events_port
    if events and {events, events + 1} & {given.api_port, given.data_port, 65536}:
        parser.error(f"--kv-events-port {events} needs itself and the next port for cache events; give another one")
    given.compile = tuple(given.compile)
    return Options(**vars(given))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="prfaas-worker",
        description="Serve one replica of a model: OpenAI API, Prefill-as-a-Service API and the data port.",
        epilog="example: prfaas-worker --model-source builtin:kimi-linear-tiny --model-name kimi-linear-tiny "
        "--host 127.0.0.1 --instance decode-0 --role decode",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "--model-source", required=True, metavar="DIR|builtin:NAME", help="model directory, or a model that ships along"
    )
    add("--model-name", required=True, metavar="NAME", help="what requests call the model")
    add("--host", type=_address, default="127.0.0.1", metavar="IP", help="address both ports listen on (%(default)s)")
    add("--api-port", type=_port, default=WORKER_API_PORT, metavar="PORT", help="HTTP port (%(default)s)")
    add("--data-port", type=_port, default=WORKER_DATA_PORT, metavar="PORT", help="cache transfer port (%(default)s)")
    add("--instance", default=os.uname().nodename, metavar="NAME", help="this replica's name, its pod's (host name)")
    add("--cluster", default="hub", metavar="NAME", help="the cluster it runs in (%(default)s)")
    add("--pool", default="", metavar="NAME", help="the pool it belongs to")
    add("--role", choices=get_args(Role), default="mixed", help="what its steps are divided for (%(default)s)")
    add("--drain-seconds", type=_count, default=30, metavar="N", help="time to finish after SIGTERM (%(default)s)")
    add(
        "--device",
        choices=get_args(Device),
        default="auto",
        help="where the model runs (a GPU that can run it, else the CPU)",
    )
    add(
        "--dtype",
        choices=get_args(Dtype),
        default="auto",
        help="type of matrix products (bfloat16 on a GPU, and on a CPU where it is quicker by measurement, and close; "
        "else float32)",
    )
    add("--threads", type=_positive, default=0, metavar="N", help="torch threads (all cores)")
    add("--max-context", type=_positive, default=0, metavar="N", dest="max_context_tokens", help="tokens (the model's)")
    add("--max-running", type=_positive, default=32, metavar="N", help="sequences computed at once (%(default)s)")
    add(
        "--compile",
        action="append",
        type=_step_shape,
        default=[],
        metavar="NxTOKENS",
        help="compile decode steps of up to N sequences of TOKENS tokens: CPU only, 20 s each, needs g++ (none)",
    )
    add(
        "--cache-mib",
        type=_positive,
        default=0,
        metavar="N",
        help="memory for the cache's pages (1024; on a GPU nine tenths of what the weights leave)",
    )
    add(
        "--host-cache-mib",
        type=_count,
        default=0,
        metavar="N",
        help="host memory for prefixes pushed out (%(default)s)",
    )
    add("--disk-cache", default="", metavar="DIR", help="keep prefixes pushed out here, over restarts too (nowhere)")
    add("--disk-cache-mib", type=_positive, default=4096, metavar="N", help="bytes to keep in DIR (%(default)s)")
    add(
        "--tls-dir",
        default="",
        metavar="DIR",
        help="serve both ports inside TLS with DIR's tls.crt, tls.key and ca.crt, which may change (plain)",
    )
    add(
        "--kv-events-port",
        type=_port_or_none,
        default=0,
        metavar="PORT",
        help="publish cache events over ZMQ here, replays on the next port (0: only on the API port)",
    )
    add(
        "--profile-seconds",
        type=_seconds,
        default=1.0,
        metavar="N",
        help="time to measure prefills before serving (%(default)s; 0: learn from requests alone)",
    )
    add(
        "--egress-mbps",
        type=_count,
        default=0,
        metavar="N",
        help="most Mbit/s to send to other instances; PUT /v1/egress changes it (%(default)s: no cap)",
    )
    add("--egress-file", default="", metavar="FILE", help="read --egress-mbps here while the file exists (nowhere)")
    add(
        "--transfer-memory-mib",
        type=_positive,
        default=256,
        metavar="N",
        help="memory that cache transfers may use beside the cache (%(default)s)",
    )
    add(
        "--wire-codec",
        choices=get_args(WireCodec),
        default="auto",
        help="how a cache is compressed on its way: auto takes what pays on the link and changes no bit, int8 changes "
        "answers a little (%(default)s)",
    )
    return parser


def _address(text: str) -> str:
    try:
        return str(ipaddress.ip_address(text))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not an IP address; give the pod's address") from None


def _port(text: str) -> int:
    return _bounded(text, 1, 65535)


def _port_or_none(text: str) -> int:
    return _bounded(text, 0, 65535)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= MAX_PROFILE_SECONDS:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds from 0 to {MAX_PROFILE_SECONDS}")
    return seconds


def _count(text: str) -> int:
    return _bounded(text, 0, 1 << 31)


def _positive(text: str) -> int:
    return _bounded(text, 1, 1 << 31)


def _step_shape(text: str) -> tuple[int, int]:
    sequences, _, tokens = text.partition("x")
    try:
        return _positive(sequences), _positive(tokens)
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(f"{text!r} is not like 16x1024, sequences and tokens of each") from None


def _bounded(text: str, low: int, high: int) -> int:
    if not text.isdecimal() or not low <= int(text) <= high:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of {low} to {high}")
    return int(text)
