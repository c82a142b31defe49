"""Keep our finalizer on the Secrets that pools are reached through, from before their first child to after their last.

A member's Secret that went first would leave what runs there behind for good.
"""

from prfaas import names
from prfaas_operator.clusters.api import PREFILL_POOL, SECRET, Object
from prfaas_operator.plan.member import secret_is_needed
from prfaas_operator.plan.sharing import project_sharer
from prfaas_operator.reconcile.runtime import Runtime


async def before_children(runtime: Runtime, name: str) -> None:
    """Put the finalizer on a Secret before anything is made through it; no call where it is known to be there."""
    if name in runtime.guarded:
        return
    secret = await runtime.hub.get(SECRET, name)
    if secret is not None:
        await _put(runtime, secret, needed=True)


async def while_needed(runtime: Runtime, secret: Object) -> None:
    """Keep the finalizer on a Secret exactly while a pool is reached through it."""
    name, kubeconfigs = secret["metadata"]["name"], runtime.kubeconfigs()
    needed = secret_is_needed(name, kubeconfigs, runtime.clusters_in_use())
    if _is_guarded(secret) and not needed:  # the watch may not have told yet of a pool that was just made
        pools = await runtime.hub.list_all(PREFILL_POOL)
        needed = secret_is_needed(name, kubeconfigs, {project_sharer(pool).cluster for pool in pools})
    await _put(runtime, secret, needed=needed)


async def release_others(runtime: Runtime) -> None:
    """Take the finalizer off Secrets that MemberClusters named once and name no more."""
    for name in runtime.guarded - set(runtime.kubeconfigs().values()):
        secret = await runtime.hub.get(SECRET, name)
        if secret is None:
            runtime.guarded.discard(name)
        else:
            await while_needed(runtime, secret)


def _is_guarded(secret: Object) -> bool:
    return names.FINALIZER in secret["metadata"].get("finalizers", ())


async def _put(runtime: Runtime, secret: Object, *, needed: bool) -> None:
    metadata, guarded = secret["metadata"], _is_guarded(secret)
    if needed != guarded and not (needed and "deletionTimestamp" in metadata):
        ours = {"finalizers": [names.FINALIZER]} if needed else {}
        # The uid keeps the apply from making an empty Secret where the old one has just gone.
        body = {"name": metadata["name"], "namespace": metadata["namespace"], "uid": metadata["uid"], **ours}
        await runtime.hub.apply({"apiVersion": "v1", "kind": "Secret", "metadata": body})
        guarded = needed
    if guarded:
        runtime.guarded.add(metadata["name"])
    else:
        runtime.guarded.discard(metadata["name"])
