"""Patience, for tests of what a transfer does: no connection, lease or copy counts as lost because a machine is busy.

As a program this is a mover that has it: its arguments are those of `prfaas_transfer.mover`.
"""

from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING

from prfaas_transfer import data_port, leases, pull, receive
from prfaas_transfer.mover import client, metrics, shared
from prfaas_transfer.mover.__main__ import main

if TYPE_CHECKING:
    import pytest  # a mover needs none

PATIENCE_SECONDS = 120
LIMITS = (
    (receive, "NO_PROGRESS_SECONDS"),
    (receive, "STARVED_SECONDS"),
    (pull, "NO_PROGRESS_SECONDS"),
    (pull, "GONE_SECONDS"),
    (pull, "AWAIT_SILENT_SECONDS"),
    (data_port, "AWAIT_SILENT_SECONDS"),
    (data_port, "HELLO_SECONDS"),
    (leases, "LEASE_SECONDS"),
    (leases, "RESUME_SECONDS"),
    (metrics, "RANK_SECONDS"),
    (shared, "COPY_SECONDS"),
    (shared, "CATCH_UP_SECONDS"),
)


def be_patient(put: Callable[[ModuleType, str, int], None] = setattr) -> None:
    for module, name in LIMITS:
        put(module, name, PATIENCE_SECONDS)


def start_patient_movers(monkeypatch: "pytest.MonkeyPatch") -> None:
    """Have this process start movers that are patient, and wait for them as patiently."""
    monkeypatch.setattr(client, "MOVER_PROGRAM", (__file__,))
    monkeypatch.setattr(client, "SEND_SECONDS", PATIENCE_SECONDS)
    monkeypatch.setattr(client, "START_SECONDS", PATIENCE_SECONDS)


if __name__ == "__main__":
    be_patient()
    main()
