"""What identities cost a gateway inside TLS, and the worker that it calls.

Two gateways before one instant worker, all inside mutual TLS: ours, and one whose handshakes check chains alone, and
which reads its files once. `python -m benchmarks.hardening.identities FLAGS` runs that one. Which endpoint a caller may
use is asked at the worker, in each request: that is timed by itself.
"""

import datetime
import functools
import ssl
import tempfile
import timeit
from collections.abc import Iterator
from pathlib import Path
from typing import Final
from unittest.mock import patch

from benchmarks.gateway.__main__ import prompt
from benchmarks.gateway.routers import backend, routing_table, serving
from benchmarks.hardening.gateway import SIZES, ratio
from benchmarks.report import Figure, say
from tests.unit.tls.mounts import Mount

from prfaas import identity
from prfaas.names import HUB
from prfaas.rights import GATEWAY, WORKER, refusal
from prfaas_gateway.__main__ import main
from prfaas_gateway.upstream import GatewayCredentials
from prfaas_transfer.credentials import PeerCredentials

REACH_RATIO: Final = 1.05
CHECKS: Final = 2_000
UNCHECKED: Final = (
    patch("prfaas_gateway.upstream._Proof.do_handshake", ssl.SSLObject.do_handshake),
    patch.object(GatewayCredentials, "context", functools.cache(GatewayCredentials.context)),
    patch.object(GatewayCredentials, "ran_out", False),
)
"""Takes the identities out of a gateway, and leaves it TLS."""


def identified() -> Iterator[Figure]:
    with tempfile.TemporaryDirectory() as made:
        folder, day = Path(made), identity.valid_for(datetime.datetime.now(datetime.UTC), 1)
        authority = identity.make_authority("bench", day)
        gateways, workers = (
            Mount(folder / part).put(identity.issue(authority, HUB, day, part), authority).path
            for part in (GATEWAY, WORKER)
        )
        flags = ("--tls-dir", str(gateways))
        with backend(workers) as worker:
            table = routing_table(worker.port, "prfaas", two_legs=False, scheme="https")
            with (
                serving(folder, "checks", table, *flags) as ours,
                serving(folder, "bare", table, *flags, module="benchmarks.hardening.identities") as bare,
            ):
                for label, (size_bytes, requests) in SIZES.items():
                    say(f"CPU inside TLS with identities and without, prompts of {label}")
                    yield Figure(
                        name=f"CPU a request inside TLS with identities, of without, {label} prompt",
                        value=ratio(ours, bare, prompt(size_bytes), requests),
                        unit="x",
                        reach=REACH_RATIO,
                    )
        yield Figure(name="a worker's check of a caller", value=check_us(workers, gateways), unit="us")


def check_us(worker: Path, caller: Path) -> float:
    """Return how long a worker takes to find out who calls, and what that caller may do."""
    credentials = PeerCredentials(worker)
    certificate = ssl.PEM_cert_to_DER_cert((caller / "tls.crt").read_text())
    authorities = credentials.now().files.authorities

    def check() -> None:
        if reason := refusal("/v1/role", credentials.check(certificate, authorities), HUB):
            raise SystemExit(reason)

    return min(timeit.repeat(check, number=CHECKS, repeat=5)) / CHECKS * 1e6


if __name__ == "__main__":
    for one in UNCHECKED:
        one.start()
    main()
