"""What all data connections of an instance share: who is let in, what is measured, and what bounds them."""

import sys
from pathlib import Path
from typing import NamedTuple

from prfaas_worker.credentials import Credentials
from prfaas_worker.options import Options
from prfaas_worker.transfer.accounting import Monitor
from prfaas_worker.transfer.bucket import TokenBucket
from prfaas_worker.transfer.budget import Budget
from prfaas_worker.transfer.door import Door, TlsDoor
from prfaas_worker.transfer.egress_file import EgressFile
from prfaas_worker.transfer.packing import Packer

MIB = 1 << 20


class Traffic(NamedTuple):
    """One of each in an engine process."""

    monitor: Monitor
    egress: TokenBucket
    memory: Budget
    packer: Packer
    door: Door


def traffic_of(options: Options) -> Traffic:
    """Return what the options ask for, with the cap in force; a file of it is followed from now on.

    Raises:
        ConfigError: they ask for credentials that cannot be used.

    """
    mbps = options.egress_mbps or None
    egress = TokenBucket(mbps)
    if options.egress_file:
        EgressFile(Path(options.egress_file), egress, otherwise=mbps).start()
    memory_bytes = options.transfer_memory_mib * MIB
    monitor = Monitor()
    door = TlsDoor(Credentials(Path(options.tls_dir))) if options.tls_dir else Door()
    return Traffic(monitor, egress, Budget(memory_bytes), Packer(options.wire_codec, monitor), door)


def unlimited() -> Traffic:
    """Return what never holds anything up."""
    monitor = Monitor()
    return Traffic(monitor, TokenBucket(), Budget(sys.maxsize), Packer("none", monitor), Door())
