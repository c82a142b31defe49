"""What an idle worker's memory costs: its three processes against `import torch` alone.

    prfaas bench worker_memory

The worker is a real one with the built-in model, idle after one answered request. Memory is the resident set of each
process added up; the proportional set (PSS), which counts shared pages once, stands beside it.
"""

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

from benchmarks.report import Figure, children_of, run

from prfaas.util import MIB, Deadline

REACH_MIB = 200.0  # the processes may take this much more than `import torch` alone
START_SECONDS = 120
HOST = f"127.{50 + os.getpid() % 50}.{os.getpid() // 50 % 250}.7"


def memory_mib(pid: int) -> tuple[float, float]:
    """Resident and proportional set of a process."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    kib = {line.split(":")[0]: int(line.split()[1]) for line in lines}
    return kib["Rss"] * 1024 / MIB, kib["Pss"] * 1024 / MIB


def torch_alone() -> tuple[float, float]:
    """A process that has imported torch, and nothing else."""
    code = "import torch, sys; print(flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        found = memory_mib(process.pid)
        process.stdin.close()
    return found


def idle_worker() -> dict[str, tuple[float, float]]:
    """Front, engine and mover after one request."""
    command = [sys.executable, "-m", "prfaas_worker", "--model-source", "builtin:kimi-linear-tiny"]
    command += ["--model-name", "m", "--host", HOST]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        body = {"model": "m", "prompt": "def main():", "max_tokens": 16}
        answer(process, f"http://{HOST}:8000/v1/completions", json.dumps(body).encode())
        (engine,) = children_of(process.pid)
        (mover,) = children_of(engine)
        return {"front": memory_mib(process.pid), "engine": memory_mib(engine), "mover": memory_mib(mover)}
    finally:
        process.terminate()
        process.wait(30)


def answer(process: subprocess.Popen, url: str, body: bytes) -> None:
    """Send the request until the worker has loaded its model and answers it."""
    deadline = Deadline(START_SECONDS)
    while True:
        try:
            request = urllib.request.Request(url, body, {"content-type": "application/json"})
            with urllib.request.urlopen(request, timeout=30):
                return
        except (urllib.error.URLError, ConnectionError):
            if process.poll() is not None or deadline.is_over:
                raise
            time.sleep(0.2)


def figures() -> list[Figure]:
    """Measure everything."""
    torch_rss, torch_pss = torch_alone()
    worker = idle_worker()
    rss = sum(rss for rss, _ in worker.values())
    pss = sum(pss for _, pss in worker.values())
    beside_rss = {"unit": "MiB", "rival": "import torch", "rival_value": torch_rss}
    beside_pss = {"unit": "MiB", "rival": "import torch", "rival_value": torch_pss}
    return [
        Figure(name="front, resident", value=worker["front"][0], unit="MiB"),
        Figure(name="engine, resident", value=worker["engine"][0], **beside_rss),
        Figure(name="worker, resident", value=rss, reach=torch_rss + REACH_MIB, **beside_rss),
        Figure(name="worker, proportional", value=pss, **beside_pss),
    ]


if __name__ == "__main__":
    run("worker_memory", __doc__, figures)
