"""A prefill instance that computes nothing: it sends caches of zeros at the rate of a link.

    python -m benchmarks.worker.peer MODEL HOST TOKENS MBPS

Serves POST /v1/prefills and the data port with the worker's own sending half, so that a decode worker sees the real
protocol. The kernel paces the connection. Ends when standard input closes.
"""

import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import msgspec
import torch
from benchmarks.worker.process import PORT

from prfaas.names import WORKER_DATA_PORT
from prfaas.wire.engine import StartPrefill
from prfaas.wire.prefill import PrefillRequest
from prfaas_transfer.cache import CacheLayout
from prfaas_transfer.data_port import DataPort, listen
from prfaas_transfer.leases import Grants, Offer, Offers
from prfaas_transfer.limits import unlimited
from prfaas_worker.cache.memory import CacheGeometry, CacheMemory
from prfaas_worker.cache.transfer_frames import CachePlace, block_frames, hidden_frame, layer_groups, state_frames
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
        self.layers = len(model.layers)
        self.hidden = torch.zeros(model.hidden_size)
        layout = CacheLayout(model.fingerprint, layer_groups(model.layers), model.hidden_size)
        self.offers, self.grants = Offers(layout, 1000), Grants()
        listener = listen(host, WORKER_DATA_PORT)
        listener.setsockopt(SOL_SOCKET, SO_MAX_PACING_RATE, int(mbps * 1e6 / 8))  # accepted connections inherit it
        DataPort(listener, self.offers, unlimited())

    def fill(self, offer: Offer, tokens: int) -> None:
        """Put the whole cache into an offer."""
        offer.start_computing()
        for layer in range(self.layers):
            for frame in block_frames(offer.manifest, self.place, layer, (0, tokens)):
                offer.put(frame)
            for frame in state_frames(offer.manifest, self.place, layer):
                offer.put(frame)
        offer.put(hidden_frame(offer.manifest, self.hidden))
        offer.finish_computing(0.0)


def handler(peer: Peer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            prefill_request = msgspec.json.decode(body, type=PrefillRequest)
            grant = peer.grants.make(WORKER_DATA_PORT, len(prefill_request.token_ids))
            offer = peer.offers.open(StartPrefill(0, prefill_request).subject, grant, prefill_request.start_token)
            peer.fill(offer, len(prefill_request.token_ids))
            answer = msgspec.json.encode(grant)
            self.send_response(201)
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
