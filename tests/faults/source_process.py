"""A source in a separate process, for tests that kill or freeze it.

    python -m tests.faults.source_process MBPS

For every line on standard input it grants a cache, whose bytes are drawn from the seed on that line, and sends it at
this rate; it prints the grant, later the handle of each offer that ended. It ends with standard input.
"""

import sys

import msgspec

from prfaas_transfer import leases
from prfaas_transfer.limits import EgressBucket

from ..unit.worker import transfer_bench as bench
from ..waiting import PATIENCE_SECONDS


def main() -> None:
    leases.LEASE_SECONDS, leases.RESUME_SECONDS = int(PATIENCE_SECONDS), 0.5
    bench.TRAFFIC = bench.TRAFFIC._replace(egress=EgressBucket(float(sys.argv[1])))
    port = bench.Port(bench.LARGE)
    port.on_end = lambda handle: print(f"ended {handle}", flush=True)
    for line in sys.stdin:
        offer, grant = port.grant(handle=int(line))
        place = bench.LARGE.reserved()
        bench.fill(place, int(line))
        bench.compute(bench.LARGE, offer, place, step=64)
        print(msgspec.json.encode(grant).decode(), flush=True)


if __name__ == "__main__":
    main()
