"""What an idle worker's memory costs: both processes against `import torch` alone.

    python -m benchmarks.worker_memory              a table
    python -m benchmarks.worker_memory -o json      the figures

The worker is a real one with the built-in model, idle after one answered request. Memory is the resident set of each
process added up; the proportional set (PSS), which counts shared pages once, stands beside it.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

REACH_MIB = 200.0  # both processes may take this much more than `import torch` alone
START_SECONDS = 120
HOST = f"127.{50 + os.getpid() % 50}.{os.getpid() // 50 % 250}.7"
MIB = 1 << 20


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
    """Front and engine after one request."""
    command = [sys.executable, "-m", "prfaas_worker", "--model-source", "builtin:kimi-linear-tiny"]
    command += ["--model-name", "m", "--host", HOST]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        body = {"model": "m", "prompt": "def main():", "max_tokens": 16}
        answer(process, f"http://{HOST}:8000/v1/completions", json.dumps(body).encode())
        engine = int(Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text())
        return {"front": memory_mib(process.pid), "engine": memory_mib(engine)}
    finally:
        process.terminate()
        process.wait(30)


def answer(process: subprocess.Popen, url: str, body: bytes) -> None:
    """Send the request until the worker has loaded its model and answers it."""
    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            request = urllib.request.Request(url, body, {"content-type": "application/json"})
            with urllib.request.urlopen(request, timeout=30):
                return
        except (urllib.error.URLError, ConnectionError):
            if process.poll() is not None or time.monotonic() > deadline:
                raise
            time.sleep(0.2)


def figures() -> list[dict]:
    """Measure everything."""
    torch_rss, torch_pss = torch_alone()
    worker = idle_worker()
    total_rss = sum(rss for rss, _ in worker.values())
    total_pss = sum(pss for _, pss in worker.values())

    def figure(
        name: str, value: float, unit: str = "MiB", reach: float | None = None, rival: float | None = None
    ) -> dict:
        return {
            "name": name,
            "value": round(value, 3),
            "unit": unit,
            "better": "lower",
            "reach": reach,
            "rival": "import torch" if rival is not None else None,
            "rival_value": round(rival, 3) if rival is not None else None,
        }

    return [
        figure("front_rss", worker["front"][0]),
        figure("engine_rss", worker["engine"][0], rival=torch_rss),
        figure("worker_rss", total_rss, reach=round(torch_rss + REACH_MIB, 3), rival=torch_rss),
        figure("worker_pss", total_pss, rival=torch_pss),
        figure("worker_rss_ratio", total_rss / torch_rss, "times", round((torch_rss + REACH_MIB) / torch_rss, 3), 1.0),
    ]


def main() -> None:
    """Print a table or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", choices=["json"], help="print the figures as JSON")
    arguments = parser.parse_args()
    found = figures()
    if arguments.output == "json":
        commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
        machine = f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
        document = {"bench": "worker_memory", "commit": commit, "machine": machine, "figures": found}
        print(json.dumps(document, indent=2))
        return
    for row in found:
        rival = f"   {row['rival']}: {row['rival_value']:.1f}" if row["rival"] else ""
        reach = f"   reach: {row['reach']:.1f}" if row["reach"] else ""
        print(f"{row['name']:<18} {row['value']:9.2f} {row['unit']}{rival}{reach}")


if __name__ == "__main__":
    main()
