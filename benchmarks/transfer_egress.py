"""How exact the egress cap is: bytes that arrive over loopback in every window of 2 s, and how alike the shares are.

    prfaas bench transfer_egress

Connections send as fast as the bucket lets them, from threads of one process, as an instance does; another process
takes. An error is the worst of all windows that start 20 ms apart, over or under; a share is that of the connection
that got least, of an equal one. The rival is the plain way: everyone sleeps for as long as his own bytes should take,
at his own part of the rate.
"""

import multiprocessing
import socket
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import NamedTuple

from benchmarks.report import Figure, run

from prfaas_transfer.limits import BYTES_PER_MBIT, EgressBucket, Stop, StoppedError
from prfaas_transfer.net import DataStream

RUN_SECONDS = 7.0
RUNNING_AFTER_SECONDS = 0.5
WINDOW_SECONDS = 2.0
STEP_SECONDS = 0.02
FRAME_BYTES = 1 << 20
CASES = ((50, 4), (200, 1), (200, 16), (1000, 4))
REACH_PERCENT = 3.0
RIVAL = "own sleeps"

Send = Callable[[socket.socket, memoryview], None]


class Received(NamedTuple):
    """Arrivals in order, of all connections, and each one's bytes."""

    seconds: list[float]
    sums: list[int]
    shares: list[int]


def bucket_source(bucket: EgressBucket, stop: Stop) -> Send:
    """Return what a connection does with a frame: as much at a time as it is granted."""

    def send(sock: socket.socket, frame: memoryview) -> None:
        stream = DataStream(sock)
        for portion in bucket.portions([frame], stop):
            stream.send(portion)

    return send


def sleeping_source(mbps: float, stop: Stop) -> Send:
    """Return the rival: the same pieces, each followed by the time that it should take."""

    def send(sock: socket.socket, frame: memoryview) -> None:
        piece_bytes = max(4096, int(mbps * BYTES_PER_MBIT * 0.005))
        for start in range(0, len(frame), piece_bytes):
            if stop.is_set:
                raise StoppedError("over")
            piece = frame[start : start + piece_bytes]
            sock.sendall(piece)
            time.sleep(len(piece) / (mbps * BYTES_PER_MBIT))

    return send


def take_all(listener: socket.socket, connections: int, results: "multiprocessing.Queue[Received]") -> None:
    """Receive until all connections end, noting when what came."""
    arrivals: list[list[tuple[float, int]]] = [[] for _ in range(connections)]

    def receive(number: int, sock: socket.socket) -> None:
        room = bytearray(1 << 20)
        while count := sock.recv_into(room):
            arrivals[number].append((time.monotonic(), count))

    threads = [
        threading.Thread(target=receive, args=(number, listener.accept()[0]), daemon=True)
        for number in range(connections)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    every = sorted(one for found in arrivals for one in found)
    total, sums = 0, []
    for _, count in every:
        total += count
        sums.append(total)
    results.put(Received([at for at, _ in every], sums, [sum(count for _, count in found) for found in arrivals]))


def transfer(connections: int, send: Send, stop: Stop) -> Received:
    """Send over so many connections for RUN_SECONDS."""
    with socket.create_server(("127.0.0.1", 0), backlog=connections) as listener:
        results: multiprocessing.Queue[Received] = multiprocessing.Queue()
        destination = multiprocessing.Process(target=take_all, args=(listener, connections, results), daemon=True)
        destination.start()
        sockets = [socket.create_connection(listener.getsockname()) for _ in range(connections)]
    frame = memoryview(bytes(FRAME_BYTES))

    def work(sock: socket.socket) -> None:
        with sock, suppress(StoppedError):
            while True:
                send(sock, frame)

    threads = [threading.Thread(target=work, args=(sock,), daemon=True) for sock in sockets]
    for thread in threads:
        thread.start()
    time.sleep(RUN_SECONDS)
    stop.set()
    for thread in threads:
        thread.join()
    received = results.get()
    destination.join()
    return received


def window_errors(received: Received, mbps: float) -> list[float]:
    """Return by how many percent each window is off."""
    wanted = mbps * BYTES_PER_MBIT * WINDOW_SECONDS
    start, end = received.seconds[0] + RUNNING_AFTER_SECONDS, received.seconds[-1] - WINDOW_SECONDS
    errors = []
    for step in range(int((end - start) / STEP_SECONDS)):
        at = start + step * STEP_SECONDS
        first, last = bisect_right(received.seconds, at), bisect_right(received.seconds, at + WINDOW_SECONDS)
        errors.append(100 * abs((received.sums[last - 1] - received.sums[first - 1]) / wanted - 1))
    return errors


def measure() -> Iterator[Figure]:
    """Measure every case and its rival."""
    for mbps, connections in CASES:
        stop, rivals_stop = Stop(), Stop()
        cpu = time.process_time()
        received = transfer(connections, bucket_source(EgressBucket(mbps), stop), stop)
        cpu = time.process_time() - cpu
        rival = transfer(connections, sleeping_source(mbps / connections, rivals_stop), rivals_stop)
        case = f"{mbps} Mbit/s, {connections} connections"
        yield Figure(
            name=f"worst window, {case}",
            value=max(window_errors(received, mbps)),
            unit="%",
            reach=REACH_PERCENT,
            rival=RIVAL,
            rival_value=max(window_errors(rival, mbps)),
        )
        yield Figure(
            name=f"least share, {case}",
            value=min(received.shares) * connections / sum(received.shares),
            unit="",
            better="higher",
            rival=RIVAL,
            rival_value=min(rival.shares) * connections / sum(rival.shares),
        )
        yield Figure(name=f"CPU of sending, {case}", value=cpu / (sum(received.shares) / 2**30), unit="s/GiB")


if __name__ == "__main__":
    run("transfer_egress", __doc__, measure)
