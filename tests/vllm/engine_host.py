"""Runs in vLLM's own environment: imports vLLM once, then forks an engine or a server for each request.

An import takes 20 s, a fork and a tiny model 3 s. The one argument is the number of a Unix socket. Each message on it
is a JSON object:
    {"name", "log", "variables", "options"}, with a socket attached: an engine, in one process, so that a test may look
        at all of it. On its socket pickled tuples pass: see `serve`.
    {"name", "log", "variables", "script"}, with a socket attached: a script, whose standard output is the socket.
    {"name", "log", "variables", "flags"}: `vllm serve` with these flags.
    {"name", "signal"}: a signal for one of these, with all processes that it has started.
"""

import ctypes
import importlib
import json
import os
import runpy
import signal
import socket
import sys
import time
import traceback
from contextlib import nullcontext, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

IDLE_SECONDS = 0.02
HOLD_SECONDS = 0.25
PR_SET_PDEATHSIG = 1


def import_vllm() -> None:
    """Import all that an engine would, so that no fork has to."""
    import torch

    torch.set_num_threads(1)
    # vLLM 0.32 multiplies by AMX tiles in its attention before any process has requested them: SIGILL when the
    # first prompt has four tokens or fewer, as a destination's has. Children inherit what is requested here.
    torch.cpu._init_amx()
    import vllm.entrypoints.cli.main
    import vllm.entrypoints.llm
    import vllm.entrypoints.openai.api_server
    import vllm.model_executor.models.llama
    import vllm.model_executor.models.qwen3_next
    import vllm.v1.engine.async_llm
    import vllm.v1.engine.core
    import vllm.v1.executor.uniproc_executor
    import vllm.v1.worker.cpu_worker  # noqa: F401

    # It looks through vLLM's sources for what it needs: once here, instead of in each fork.
    importlib.import_module("prfaas_vllm")


def fork_engines_of_servers() -> None:
    """Have a server fork its engine, as it does for a GPU, and the engine compute.

    For CPUs vLLM would spawn both an engine and a process that computes, to bind threads to cores, which is not wanted
    here. Each would import vLLM again: a server would take a minute of a core to start.
    """
    from vllm.platforms.cpu import CpuPlatform

    check = CpuPlatform.check_and_update_config

    def check_and_fork(config: Any) -> None:
        check(config)
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
        if config.parallel_config.world_size == 1:
            config.parallel_config.distributed_executor_backend = "uni"

    CpuPlatform.check_and_update_config = staticmethod(check_and_fork)


def overlap_batches() -> None:
    """Have an engine schedule a batch while another one is in flight, as for a GPU.

    vLLM turns that off for CPUs, where a batch has been computed when Python is through with it. So there is nothing
    to wait for: streams and events are stand-ins.
    """
    import torch
    from vllm.platforms.cpu import CpuPlatform

    check = CpuPlatform.check_and_update_config

    def check_and_overlap(config: Any) -> None:
        check(config)
        config.scheduler_config.async_scheduling = True

    CpuPlatform.check_and_update_config = staticmethod(check_and_overlap)
    torch.cuda.Event = torch.cuda.Stream = MagicMock
    torch.cuda.current_stream = MagicMock()
    torch.cuda.stream = lambda _stream: nullcontext()


def hold_streams(from_tokens: int, until: Path, *, dies: bool) -> None:
    """Have a server's streams crawl from this token on until a file exists, so that none ends before. A server that
    `dies` counts them itself: once two have so many tokens, it makes the file and kills itself with its engine."""
    from vllm.v1.core.sched.scheduler import Scheduler

    update = Scheduler.update_from_output

    def update_and_hold(scheduler: Any, *arguments: Any) -> Any:
        found = update(scheduler, *arguments)
        begun = [one for one in scheduler.requests.values() if one.num_output_tokens >= from_tokens]
        if dies and len(begun) > 1:
            until.touch()
            os.killpg(0, signal.SIGKILL)
        if begun and not until.exists():
            time.sleep(HOLD_SECONDS)
        return found

    Scheduler.update_from_output = update_and_hold


def end_with(parent: int) -> None:
    """Have the kernel kill this process when its parent ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def main(control: socket.socket) -> None:
    import_vllm()
    fork_engines_of_servers()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # only its socket shows how an engine ended
    host, started = os.getpid(), dict[str, int]()
    control.sendall(b"ready\n")
    while True:
        data, descriptors, _, _ = socket.recv_fds(control, 1 << 20, 1)
        if not data:
            return
        wanted = json.loads(data)
        if "signal" in wanted:
            with suppress(ProcessLookupError):  # it has ended
                os.killpg(started[wanted["name"]], wanted["signal"])
            continue
        started[wanted["name"]] = os.fork()
        if started[wanted["name"]] == 0:
            end_with(host)
            control.close()
            be_child(wanted, descriptors)
        with suppress(PermissionError, ProcessLookupError):  # the child was quicker, or has ended
            os.setpgid(started[wanted["name"]], 0)
        for descriptor in descriptors:
            os.close(descriptor)


def be_child(wanted: dict[str, Any], descriptors: list[int]) -> None:
    """Be the wanted child; never return."""
    os.setpgid(0, 0)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    log = os.open(wanted["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.update(wanted["variables"])
    try:
        if "script" in wanted:
            run_script(wanted["script"], descriptors[0])
        elif descriptors:
            run_engine(Connection(descriptors[0]), wanted["options"])
        else:
            run_server(wanted["flags"])
    except SystemExit:
        pass
    except BaseException:
        traceback.print_exc()
    finally:
        if not descriptors:
            print("vllm serve has ended", file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def run_engine(connection: Connection, options: dict[str, Any]) -> None:
    """Be an engine until the other end says "stop" or closes."""
    try:
        serve(connection, start_engine(options))
    except (EOFError, BrokenPipeError):
        pass
    except BaseException:
        connection.send(("broken", traceback.format_exc(limit=-3)))
        raise


def run_script(path: str, output: int) -> None:
    os.dup2(output, 1)
    os.close(output)
    sys.path.insert(0, str(Path(path).parent))
    runpy.run_path(path, run_name="__main__")


def run_server(flags: list[str]) -> None:
    from vllm.entrypoints.cli.main import main as vllm_main

    if until := os.environ.get("HOLD_UNTIL"):
        hold_streams(int(os.environ["HOLD_FROM"]), Path(until), dies=bool(os.environ.get("DIES")))
    sys.argv = ["vllm", "serve", *flags]
    vllm_main()


def start_engine(options: dict[str, Any]) -> Any:
    if os.environ.get("BATCHES_IN_FLIGHT") == "2":
        overlap_batches()
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    return LLMEngine.from_engine_args(EngineArgs(**options))


def serve(connection: Connection, engine: Any) -> None:
    """Answer what comes, and step the engine while it has work.

    In:  ("add", key, ids, sampling, params) ("abort", key) ("evaluate", key, expression) ("stop",)
    Out: ("ready", facts) ("tokens", key, Δ) ("value", key, value) ("failed", key, text) ("broken", text)
    """
    core = engine.engine_core.engine_core
    scheduler = core.scheduler
    connection.send(("ready", {"page_tokens": engine.vllm_config.cache_config.block_size}))
    while True:
        # Blocks whose transfer has not ended yet are freed in a step, which a server makes in its loop.
        busy = engine.has_unfinished_requests() or scheduler.has_requests() or bool(core.batch_queue)
        pinned = bool(scheduler.requests)
        while connection.poll(0 if busy else IDLE_SECONDS if pinned else None):
            message = connection.recv()
            if message[0] == "stop":
                return
            answer(connection, engine, message)
            busy = True
        began = time.monotonic()
        for output in engine.step():
            connection.send(("tokens", output.request_id, describe(output)))
        if not scheduler.running and time.monotonic() - began < IDLE_SECONDS / 10:
            time.sleep(IDLE_SECONDS / 10)  # all wait for caches: leave the core to those that compute them


def answer(connection: Connection, engine: Any, message: tuple) -> None:
    kind, key, *rest = message
    try:
        if kind == "add":
            add(engine, key, *rest)
        elif kind == "abort":
            engine.abort_request([key])
        else:
            value = eval(rest[0], {"engine": engine, "core": engine.engine_core.engine_core, "os": os})
            connection.send(("value", key, value))
    except Exception:
        connection.send(("failed", key, traceback.format_exc(limit=-3)))


def add(engine: Any, key: str, ids: list[int], sampling: dict[str, Any], params: dict[str, Any] | None) -> None:
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    extra = {"kv_transfer_params": params} if params else None
    chosen = SamplingParams(**sampling, extra_args=extra, output_kind=RequestOutputKind.DELTA)
    (prompt,) = engine.renderer.render_cmpl([{"prompt_token_ids": ids}])
    engine.add_request(key, prompt, chosen)


def describe(output: Any) -> dict[str, Any]:
    """What one step adds to an answer, in types that need no vLLM to be read."""
    (new,) = output.outputs
    ids = list(new.token_ids)
    return {
        "tokens": ids,
        "logprobs": [found[token].logprob for token, found in zip(ids, new.logprobs or [], strict=False)],
        "prompt_logprobs": [
            None if found is None else found[token].logprob
            for token, found in zip(output.prompt_token_ids or [], output.prompt_logprobs or [], strict=False)
        ],
        "cached_tokens": output.num_cached_tokens or 0,
        "finish_reason": new.finish_reason if output.finished else None,
        "params": output.kv_transfer_params,
    }


if __name__ == "__main__":
    sys.path.remove(str(Path(__file__).parent))  # the folder's files are pytest's, and none of ours
    main(socket.socket(fileno=int(sys.argv[1])))
