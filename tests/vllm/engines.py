"""vLLM engines for tests: each in a process that `engine_host.py` forks, and used over its own socket."""

import itertools
import json
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from prfaas.ports import free_ports
from prfaas.processes import ends_with_us, tail
from prfaas_sandbox.vllm import checkout_path

from ..waiting import NotInTime

HOST = Path(__file__).with_name("engine_host.py")
START_SECONDS = 600.0
ANSWER_SECONDS = 300.0
VARIABLES = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_TARGET_DEVICE": "cpu",
}
# 64 MiB of cache, small batches, no compilation: 0.4 GB an engine.
OPTIONS = {
    "dtype": "bfloat16",
    "enforce_eager": True,
    "max_model_len": 4096,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 512,
    "kv_cache_memory_bytes": 64 << 20,
    "gpu_memory_utilization": 0.1,
    "distributed_executor_backend": "uni",
}


@dataclass
class Answer:
    """What an engine has generated for one request; with `finish_reason` it is whole."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    prompt_logprobs: list[float | None] = field(default_factory=list)
    cached_tokens: int = 0
    finish_reason: str | None = None
    params: dict[str, Any] | None = None

    def extend(self, new: dict[str, Any]) -> None:
        self.tokens += new["tokens"]
        self.logprobs += new["logprobs"]
        self.prompt_logprobs = self.prompt_logprobs or new["prompt_logprobs"]
        self.cached_tokens = max(self.cached_tokens, new["cached_tokens"])
        self.finish_reason, self.params = new["finish_reason"], new["params"] or self.params


class EngineError(AssertionError):
    """An engine ended or refused; the message has the end of its log."""


class Running:
    """A request on its way."""

    def __init__(self, engine: "Engine", key: str):
        self.engine, self.key = engine, key
        self.answer = Answer()
        self.done: Future[Answer] = Future()
        self._more = threading.Condition()

    def result(self, seconds: float = ANSWER_SECONDS) -> Answer:
        """Wait for the whole answer. Raises EngineError if the engine ends before."""
        return in_time(self.done, f"the answer of {self.key}", seconds)

    def wait_tokens(self, count: int, seconds: float = ANSWER_SECONDS) -> None:
        """Wait until the answer has `count` tokens."""
        with self._more:
            if not self._more.wait_for(lambda: len(self.answer.tokens) >= count or self.done.done(), seconds):
                raise NotInTime(f"{self.key} has no {count} tokens after {seconds:g} s")

    def abort(self) -> None:
        """Tell the engine that no caller waits; the answer stays as it is."""
        self.engine.tell("abort", self.key)
        self.engine.forget(self.key)
        self.done.cancel()

    def extend(self, new: dict[str, Any]) -> None:
        with self._more:
            self.answer.extend(new)
            if self.answer.finish_reason and not self.done.cancelled():
                self.done.set_result(self.answer)
            self._more.notify_all()


class Engine:
    """One vLLM engine in one process."""

    def __init__(self, name: str, connection: Connection, log: Path):
        self.name, self.log = name, log
        self.page_tokens = 0
        self._connection = connection
        self._sending = threading.Lock()
        self._keys = (f"{name}-{number}" for number in itertools.count())
        self._running: dict[str, Running] = {}
        self._values: dict[str, Future[Any]] = {}
        self._ready: Future[dict[str, Any]] = Future()
        threading.Thread(target=self._read, name=f"reads {name}", daemon=True).start()

    def wait_ready(self) -> "Engine":
        self.page_tokens = in_time(self._ready, f"{self.name}, see {self.log},", START_SECONDS)["page_tokens"]
        return self

    def submit(
        self, ids: Sequence[int], max_tokens: int, params: dict[str, Any] | None = None, **sampling: Any
    ) -> Running:
        """Begin a request: greedy, to the last token, with logprobs, unless `sampling` says otherwise. `params` are
        its kv_transfer_params."""
        running = Running(self, next(self._keys))
        self._running[running.key] = running
        greedy = {"temperature": 0.0, "max_tokens": max_tokens, "ignore_eos": True, "logprobs": 0}
        self.tell("add", running.key, list(ids), greedy | sampling, params)
        return running

    def generate(
        self, ids: Sequence[int], max_tokens: int, params: dict[str, Any] | None = None, **sampling: Any
    ) -> Answer:
        return self.submit(ids, max_tokens, params, **sampling).result()

    def evaluate(self, expression: str, seconds: float = ANSWER_SECONDS) -> Any:
        """The value of an expression over `engine` (LLMEngine), `core` (EngineCore) and `os`, between two steps."""
        key = next(self._keys)
        future = self._values[key] = Future()
        self.tell("evaluate", key, expression)
        return in_time(future, f"{self.name}'s value of {expression}", seconds)

    def free_pages(self) -> int:
        return self.evaluate("core.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()")

    def forget_prefixes(self) -> None:
        """Empty the prefix cache."""
        assert self.evaluate("engine.reset_prefix_cache()"), f"{self.name} still holds pages"

    def stop(self) -> None:
        with suppress(EngineError):
            self.tell("stop")

    def tell(self, *message: Any) -> None:
        with self._sending:
            try:
                self._connection.send(message)
            except OSError as error:
                raise self._ended() from error

    def forget(self, key: str) -> None:
        self._running.pop(key, None)

    def _read(self) -> None:
        error: BaseException | None = None
        try:
            while True:
                self._hear(*self._connection.recv())
        except (EOFError, OSError):
            error = self._ended()
        except EngineError as found:
            error = found
        for waiting in (self._ready, *self._values.values(), *(one.done for one in self._running.values())):
            if not waiting.done():
                waiting.set_exception(error)

    def _hear(self, kind: str, *rest: Any) -> None:
        if kind == "ready":
            self._ready.set_result(rest[0])
        elif kind == "broken":
            raise EngineError(f"{self.name}: {rest[0]}")
        elif kind == "tokens":
            key, new = rest
            running = self._running.pop(key, None) if new["finish_reason"] else self._running.get(key)
            if running is not None:  # else it was aborted
                running.extend(new)
        elif kind == "value":
            self._values.pop(rest[0]).set_result(rest[1])
        else:
            key, text = rest
            waiting = self._values.pop(key, None) or self._running.pop(key).done
            waiting.set_exception(EngineError(f"{self.name}: {text}"))

    def _ended(self) -> EngineError:
        return EngineError(f"{self.name} has ended; the end of {self.log}:\n{tail(self.log)}")


class Reference(NamedTuple):
    """What an undisturbed engine answers: `tokens` and `logprobs` that follow `prompt`."""

    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]


def contained() -> list[str]:
    """Return what to put before a command: it and all that it starts end together, and with the thread that started
    it, however that ends. It sees only its own processes."""
    return [*ends_with_us(), "unshare", "--user", "--map-root-user", "--pid", "--mount-proc", "--fork", "--kill-child"]


class Named(Protocol):
    """An engine or a server."""

    name: str


class EngineHost:
    """The process that forks engines. All of them end with the thread that made it, however that ends."""

    def __init__(self, python: Path, folder: Path, model: Path):
        self._folder, self.model = folder, model
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        variables = VARIABLES | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "PYTHONPATH": checkout_path()}
        with theirs, self._log("host").open("wb") as log:
            self._process = subprocess.Popen(
                [*contained(), python, HOST, str(theirs.fileno())],
                env=os.environ | variables,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self._ports = itertools.count(free_ports(1)[0])
        self._is_ready = False

    def start(self, name: str, variables: Mapping[str, str] | None = None, **options: Any) -> Engine:
        """Fork an engine; `options` are arguments of vLLM's EngineArgs. It is ready after `wait_ready`."""
        ours, theirs = socket.socketpair()
        chosen = OPTIONS | {"model": str(self.model), "served_model_name": "tiny"} | options
        with theirs:
            log = self._start({"name": name, "options": chosen}, variables or {}, [theirs.fileno()])
        return Engine(name, Connection(ours.detach()), log)

    def serve(self, name: str, flags: Sequence[str], variables: Mapping[str, str] | None = None) -> Path:
        """Fork `vllm serve` for the model, with these flags besides; return its log."""
        # Its engine is a separate process, as it always is; what it forks has imported vLLM, too.
        processes = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_WORKER_MULTIPROC_METHOD": "fork"}
        return self._start({"name": name, "flags": [str(self.model), *flags]}, processes | dict(variables or {}), [])

    def run(self, script: str, **variables: str) -> str:
        """Return the last line that a script of this folder says, which needs no engine."""
        ours, theirs = socket.socketpair()
        with theirs:
            wanted = {"name": script, "script": str(HOST.with_name(script))}
            log = self._start(wanted, {"MODEL_FOLDER": str(self.model)} | variables, [theirs.fileno()])
        with ours, ours.makefile() as output:
            ours.settimeout(START_SECONDS)
            try:
                lines = output.readlines()
            except TimeoutError as error:
                raise NotInTime(f"{script} has no result after {START_SECONDS:g} s") from error
        if not lines:
            raise EngineError(f"{script} has failed; the end of {log}:\n{tail(log)}")
        return lines[-1]

    def kill(self, one: Named) -> None:
        """End an engine or a server now, in the middle of whatever it does."""
        self._control.sendall(json.dumps({"name": one.name, "signal": signal.SIGKILL}).encode())

    def close(self) -> None:
        self._control.close()
        self._process.kill()
        self._process.wait()

    def _start(self, wanted: dict[str, Any], variables: Mapping[str, str], descriptors: list[int]) -> Path:
        self._wait_imported()
        log = self._log(wanted["name"])
        log.touch()
        wanted |= {"log": str(log), "variables": {"MASTER_PORT": str(next(self._ports))} | dict(variables)}
        socket.send_fds(self._control, [json.dumps(wanted).encode()], descriptors)
        return log

    def _wait_imported(self) -> None:
        if self._is_ready:
            return
        self._control.settimeout(START_SECONDS)
        try:
            ready = self._control.recv(16)
        except TimeoutError as error:
            raise NotInTime(f"vLLM is not imported after {START_SECONDS:g} s") from error
        if ready != b"ready\n":
            raise EngineError(f"vLLM cannot be imported; the end of {self._log('host')}:\n{tail(self._log('host'))}")
        self._is_ready = True

    def _log(self, name: str) -> Path:
        return self._folder / f"{name}.log"


def in_time(future: Future[Any], what: str, seconds: float) -> Any:
    """Return a future's result. Raise NotInTime when it does not come."""
    try:
        return future.result(seconds)
    except TimeoutError as error:
        raise NotInTime(f"{what} did not come within {seconds:g} s") from error


def reference_of(engine: Engine, ids: Sequence[int], count: int) -> Reference:
    """What `engine`, alone, answers to a prompt that is `ids` and its own first greedy token.

    A destination computes the prompt's last token as a decode step. Another kernel computes it as the end of a chunk,
    and its rounding differs. After a first greedy token both do the same, so the figures must be equal to the last bit.
    """
    engine.forget_prefixes()
    answer = engine.generate(ids, count + 1)
    return Reference([*ids, answer.tokens[0]], answer.tokens[1:], answer.logprobs[1:])
