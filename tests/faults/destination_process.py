"""A destination in a separate process, for tests that kill or freeze it.

    python -m tests.faults.destination_process PORT < GRANT

Says "ready" when it can take a grant, "begins" when the first frame is there, and "whole" at a good end.
"""

import sys
from types import SimpleNamespace

import msgspec

from prfaas.wire.prefill import PrefillGrant
from prfaas.wire.transfer import Manifest
from prfaas_worker.cache.transfer_frames import layer_groups

from ..unit.worker import transfer_bench as bench
from ..waiting import eventually


def manifest_of(grant: PrefillGrant) -> Manifest:
    """What a destination expects that knows the model."""
    return Manifest(
        fingerprint=bench.FINGERPRINT,
        transfer_id=grant.transfer_id,
        epoch=grant.epoch,
        start_token=0,
        end_token=grant.end_token,
        groups=layer_groups(bench.LARGE.layers),
        hidden_size=len(bench.HIDDEN),
    )


def main() -> None:
    print("ready", flush=True)
    grant = msgspec.json.decode(sys.stdin.readline(), type=PrefillGrant)
    source = SimpleNamespace(
        model=bench.LARGE, layout=bench.layout_of(bench.LARGE), address=("127.0.0.1", int(sys.argv[1]))
    )
    taking = bench.Taking(source, SimpleNamespace(manifest=manifest_of(grant)), grant)  # type: ignore[arg-type]
    eventually(lambda: taking.ledger.received_bytes > 0, "the destination has bytes")
    print("begins", flush=True)
    taking.whole()
    print("whole", flush=True)


if __name__ == "__main__":
    main()
