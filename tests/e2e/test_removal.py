"""Proves that prfaas goes as it came: nothing is left in either cluster but what was to be kept.

This takes the installation away that all other tests of this folder share, so conftest.py has it run last.
"""

import asyncio

import pytest

from prfaas_sandbox.demo.install import NAMESPACE, ExampleInstallation

from .checks import eventually, only_in_the_sandbox

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="session")]


@only_in_the_sandbox
async def test_deleting_and_uninstalling_leaves_nothing_but_what_was_to_be_kept(installation: ExampleInstallation):
    environment = installation.environment
    await environment.kubectl(environment.hub, "-n", NAMESPACE, "delete", "prfaas-all", "--all", "--timeout=120s")
    kinds = "deployments,pods,services,configmaps,serviceaccounts,roles,rolebindings,networkpolicies,leases"

    async def nothing_left() -> bool:
        for cluster in (environment.hub, environment.member):
            listing = await environment.kubectl(
                cluster, "get", kinds, "-A", "-l", "app.kubernetes.io/managed-by=prfaas-operator", "-o", "name"
            )
            if listing.strip():
                return False
        return True

    await eventually(nothing_left, "no child of a custom resource is left")
    await uninstall(installation)


async def uninstall(installation: ExampleInstallation) -> None:
    """Uninstall both releases; nothing of them is left but the CRDs."""
    environment = installation.environment
    words = ("uninstall", "prfaas", "-n", NAMESPACE, "--wait", "--timeout=120s")
    await asyncio.gather(*(environment.helm(cluster, *words) for cluster in (environment.hub, environment.member)))
    kinds = (
        "deployments,replicasets,pods,services,configmaps,serviceaccounts,roles,rolebindings,networkpolicies,leases,"
        "poddisruptionbudgets,clusterroles,clusterrolebindings"
    )

    async def nothing_left() -> bool:
        listings = [
            await environment.kubectl(
                cluster, "get", kinds, "-A", "-l", "app.kubernetes.io/part-of=prfaas", "-o", "name"
            )
            for cluster in (environment.hub, environment.member)
        ]
        return not "".join(listings).strip()

    await eventually(nothing_left, "nothing of the charts is left")
    crds = await environment.kubectl(environment.hub, "get", "crds", "-o", "name")
    assert "prefillpools.prfaas.io" in crds, "custom resources outlive the release that brought their definitions"
