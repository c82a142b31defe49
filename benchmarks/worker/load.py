"""Keeps a worker's front process as busy as it can be with work that never reaches its engine.

    python -m benchmarks.worker.load HOST

Sends large requests for a model that is not served, over a few connections, until standard input closes; then prints
how many were answered. Each has to be received and parsed before it can be refused.
"""

import json
import select
import socket
import sys

from benchmarks.worker.process import PORT

CONNECTIONS = 4
PROMPT_BYTES = 20_000


def request(host: str) -> bytes:
    body = json.dumps({"model": "another", "prompt": "x" * PROMPT_BYTES}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def main() -> None:
    host = sys.argv[1]
    data = request(host)
    sockets = [socket.create_connection((host, PORT)) for _ in range(CONNECTIONS)]
    for connection in sockets:
        connection.sendall(data)
    answered = 0
    while True:
        readable, _, _ = select.select([sys.stdin, *sockets], [], [])
        if sys.stdin in readable:
            break
        for connection in readable:
            if connection.recv(1 << 16).startswith(b"HTTP/1.1 404"):  # small enough to come in one piece
                answered += 1
                connection.sendall(data)
    print(answered, flush=True)


if __name__ == "__main__":
    main()
