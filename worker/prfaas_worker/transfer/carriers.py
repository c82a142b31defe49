"""What moves a frame's payload where TCP need not: the seam for transfer engines inside one trusted fabric.

Headers, handshakes, digests, resuming and leases stay on the data connection; a carrier moves payloads alone. The giver
lends memory that its carrier's peers may read, sends the address behind the header in place of the payload, and has the
memory back when the taker says TAKEN or the connection ends. Whatever was read is checked against the digest like any
other bytes, so that a carrier can be slow or wrong, but nothing corrupt is ever used.

A carrier belongs to a *fabric*, a name that the operator of the machines gives to those that may read each other's
memory. Two instances use one only when both name the same.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Final, NamedTuple, Protocol

from prfaas.wire.frames import Buffer
from prfaas_worker.transfer.stop import Stop

CARRIED_BYTES: Final = 64 << 10
"""Smaller payloads travel behind their headers: an address saves nothing there."""


class Slot(NamedTuple):
    """Memory that was lent: its address as the carrier's peers know it, and its number here."""

    address: int
    number: int


class Carrier(Protocol):
    """Moves payloads of at most `slot_bytes`. Any thread may call."""

    fabric: str
    segment: str
    """Where peers find this instance's memory."""
    slot_bytes: int

    def lend(self, payload: Sequence[Buffer], stop: Stop, timeout_seconds: float) -> Slot:
        """Copy a payload to where peers may read it; waits for a free slot.

        Raises:
            CapacityError: none came free in time.
            StoppedError: `stop` was set meanwhile.

        """
        ...

    def take_back(self, slot: Slot) -> None:
        """Use a slot anew."""
        ...

    def fetched(self, segment: str, address: int, nbytes: int, stop: Stop) -> AbstractContextManager[memoryview]:
        """Read a payload from a peer's memory; the bytes are there while the block runs.

        Raises:
            UnreachableError: the peer's memory cannot be read.
            CapacityError: there is no memory to read into.
            StoppedError: `stop` was set meanwhile.

        """
        ...


def refusal(ours: str, theirs: str, our_cluster: str, their_cluster: str) -> str:
    """Say why a taker that asks for fabric `theirs` may not use ours; empty when it may.

    Clusters are the identities of the certificates, empty without TLS.
    """
    if not theirs or (theirs == ours and our_cluster == their_cluster):
        return ""
    where = (
        f"clusters {their_cluster!r} and {our_cluster!r}"
        if our_cluster != their_cluster
        else f"fabrics {theirs!r} and {ours!r}"
    )
    return (
        f"Mooncake Transfer Engine moves memory without authentication or encryption: refused between {where}. "
        "Leave --mooncake-fabric out on instances that exchange caches beyond one trusted fabric"
    )
