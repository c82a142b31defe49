"""A prefill instance that computes nothing: it sends caches of zeros at the rate of a link.

    python -m benchmarks.worker.peer MODEL HOST TOKENS MBPS

Serves source legs and the data port with the worker's own sending half, so that a decode worker sees the real
protocol. The kernel paces the connection. Ends when standard input closes.
"""

import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import msgspec
from benchmarks.worker.process import PORT

from prfaas.names import WORKER_DATA_PORT
from prfaas.wire.engine import TransferSubject
from prfaas.wire.frames import Address
from prfaas.wire.prefill import LegParams, token_digest
from prfaas_transfer.cache import CacheLayout
from prfaas_transfer.data_port import DataPort, listen
from prfaas_transfer.leases import Offers
from prfaas_transfer.limits import unlimited
from prfaas_worker.cache.memory import CacheMemory
from prfaas_worker.cache.transfer_frames import CachePlace, layer_groups, prefix_frames
from prfaas_worker.cache_spec import CacheGeometry
from prfaas_worker.models import load_model

SO_MAX_PACING_RATE = 47
SOL_SOCKET = 1


class Peer:
    """The cache that is sent, again and again, and the offers under which it is."""

    def __init__(self, source: str, host: str, tokens: int, mbps: float):
        model, _ = load_model(source, 1)
        geometry = CacheGeometry(model.layers)
        pages = geometry.pages_for(tokens)
        memory = CacheMemory(geometry, num_pages=pages, num_slots=1, max_context=tokens)
        memory.pages.zero_()
        self.place = CachePlace(memory, 0, range(pages))
        self.layout = CacheLayout(model.fingerprint, layer_groups(model.layers))
        self.offers = Offers(1000)
        listener = listen(host, WORKER_DATA_PORT)
        listener.setsockopt(SOL_SOCKET, SO_MAX_PACING_RATE, int(mbps * 1e6 / 8))  # accepted connections inherit it
        DataPort(listener, self.offers, unlimited())

    def give(self, token_ids: list[int], leg: LegParams) -> None:
        """Offer the whole cache of a prompt."""
        goal = len(token_ids) - 1
        manifest = self.layout.manifest(Address(leg.transfer_id, leg.epoch), 0, goal, token_digest(token_ids[:goal]))
        offer = self.offers.announce(TransferSubject(0, "bench"), manifest, leg.token)
        for frame in prefix_frames(offer.manifest, self.place):
            offer.put(frame)
        offer.finish_computing(0.0)


def handler(peer: Peer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            fields = msgspec.json.decode(body)
            leg = msgspec.convert(fields["kv_transfer_params"]["prfaas"], LegParams)
            peer.give(fields["prompt"], leg)
            answer = msgspec.json.encode({"usage": {"completion_tokens": 0}})
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    return Handler


def main() -> None:
    source, host, tokens, mbps = sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4])
    peer = Peer(source, host, tokens, mbps)
    server = ThreadingHTTPServer((host, PORT), handler(peer))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print("ready", flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
