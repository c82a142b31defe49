"""Proves how the demo's installation waits for an object: as long as it may, and no longer for another failure."""

import json
from pathlib import Path
from typing import cast

import pytest

from prfaas.errors import PeerError
from prfaas_sandbox.demo.install import ExampleInstallation
from prfaas_sandbox.environment import ClusterAccess, Environment

CONDITION = {"type": "Ready", "status": "False", "reason": "NoReadyInstances"}
LISTED = {"items": [{"kind": "PrfaaSPolicy", "metadata": {"name": "kimi"}, "status": {"conditions": [CONDITION]}}]}
IN_VAIN = "error: timed out waiting for the condition on prfaaspolicies/kimi"


class ScriptedCluster:
    """Answers `kubectl wait` with these errors, one after the other, then well."""

    hub = ClusterAccess("hub", Path(), "")

    def __init__(self, *errors: str):
        self._errors = list(errors)
        self.waits = 0

    async def kubectl(self, _cluster: ClusterAccess, *arguments: str) -> str:
        if "wait" not in arguments:
            return json.dumps(LISTED)
        self.waits += 1
        if self._errors:
            raise PeerError(self._errors.pop(0))
        return ""


async def wait(cluster: ScriptedCluster, seconds: float) -> None:
    installation = ExampleInstallation(cast(Environment, cluster))
    await installation.wait_for("Ready", "prfaaspolicy", "kimi", timeout_seconds=seconds)


async def test_a_wait_that_one_command_cannot_make_is_made_by_several():
    cluster = ScriptedCluster(IN_VAIN, IN_VAIN)
    await wait(cluster, 900)
    assert cluster.waits == 3


async def test_a_wait_ends_with_its_time_and_with_any_other_error():
    for errors, seconds in (((IN_VAIN, IN_VAIN), -1.0), (("error: no matches for kind",), 900)):
        cluster = ScriptedCluster(*errors)
        with pytest.raises(PeerError, match="NoReadyInstances"):
            await wait(cluster, seconds)
        assert cluster.waits == 1
