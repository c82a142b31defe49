"""What else carries bytes over the same link in the same run: iperf3, or plain sockets where it is not installed.

    python -m benchmarks.transfer.rivals send|receive ADDRESS SECONDS

iperf3 runs once with every congestion control that is judged, and the fastest counts: the host's default may be the
wrong one for a link.
"""

import json
import resource
import shutil
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import NamedTuple

from benchmarks.transfer.link import Link

ROOT = Path(__file__).resolve().parents[2]
CONGESTION = ("cubic", "bbr")
STREAMS = 4
PORT = 5201
BLOCK = bytes(1 << 20)


class Carried(NamedTuple):
    """What a rival reached: its name, Mbit/s received, and CPU seconds of both its ends for 2^30 bytes."""

    name: str
    mbps: float
    cpu_seconds: float


def best_rival(link: Link, seconds: float, streams: int = STREAMS) -> Carried:
    """Run the rival over a link with each congestion control for so long, and return the fastest."""
    if shutil.which("iperf3") is None:
        return _sockets(link, seconds)
    there = Path("/proc/sys/net/ipv4/tcp_available_congestion_control").read_text().split()
    return max(
        (_iperf3(link, seconds, streams, name) for name in CONGESTION if name in there), key=lambda one: one.mbps
    )


def _iperf3(link: Link, seconds: float, streams: int, congestion: str) -> Carried:
    server = link.destination.start(["iperf3", "-s", "-1", "--forceflush"], stdout=subprocess.PIPE)
    assert server.stdout is not None
    try:
        while (line := server.stdout.readline()) and "listening" not in line:
            pass
        command = ["iperf3", "-c", link.destination.address, "-J", "-l1M", f"-P{streams}", "-t", f"{seconds:g}"]
        report = json.loads(link.source.run(*command, "-C", congestion))
    except BaseException:
        server.kill()
        raise
    finally:
        server.communicate()
    end = report["end"]
    received, used = end["sum_received"], end["cpu_utilization_percent"]
    cpu = (used["host_total"] + used["remote_total"]) / 100 * received["seconds"]
    mbps = received["bits_per_second"] / 1e6
    return Carried(f"iperf3 -P{streams} -l1M", mbps, cpu / received["bytes"] * (1 << 30))


def _sockets(link: Link, seconds: float) -> Carried:
    """Pump zeros from Python over connections with the host's settings, as iperf3 would from C."""
    command = [sys.executable, "-m", "benchmarks.transfer.rivals"]
    arguments = [link.destination.address, str(seconds)]
    receiver = link.destination.start([*command, "receive", *arguments], cwd=ROOT, stdout=subprocess.PIPE)
    sender = link.source.start([*command, "send", *arguments], cwd=ROOT, stdout=subprocess.PIPE)
    (sent, _), (received, _) = sender.communicate(), receiver.communicate()
    count, took, cpu = json.loads(received)
    cpu += json.loads(sent)[2]
    return Carried(f"{STREAMS} plain sockets", count * 8e-6 / took, cpu / count * (1 << 30))


def _send(sock: socket.socket, seconds: float) -> int:
    until, sent = time.monotonic() + seconds, 0
    while time.monotonic() < until:
        sent += sock.send(BLOCK)
    sock.close()
    return sent


def _receive(sock: socket.socket, _seconds: float) -> int:
    room, received = bytearray(len(BLOCK)), 0
    while count := sock.recv_into(room):
        received += count
    return received


def main() -> None:
    role, address, seconds = sys.argv[1], sys.argv[2], float(sys.argv[3])
    if role == "receive":
        with socket.create_server((address, PORT), backlog=STREAMS) as listener:
            sockets = [listener.accept()[0] for _ in range(STREAMS)]
    else:
        sockets = [_connect(address) for _ in range(STREAMS)]
    started, counts = time.monotonic(), [0] * STREAMS
    pump = _receive if role == "receive" else _send

    def run(index: int) -> None:
        counts[index] = pump(sockets[index], seconds)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(STREAMS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    used = resource.getrusage(resource.RUSAGE_SELF)
    print(json.dumps([sum(counts), time.monotonic() - started, used.ru_utime + used.ru_stime]))


def _connect(address: str) -> socket.socket:
    until = time.monotonic() + 5
    while True:
        try:
            return socket.create_connection((address, PORT))
        except ConnectionRefusedError:
            if time.monotonic() > until:
                raise
            time.sleep(0.02)


if __name__ == "__main__":
    main()
