"""What pools say of themselves, as profiles: a seed for the loop where nothing was measured yet.

A pool names a built-in profile, or gives its own figures. A seed may lack a part. Without points its seconds are not
known, and it counts no samples. The size of a cache is a property of the model, so what one pool of a policy says of it
holds for all. Instances that two pools share are the DecodePool's, and so is their seed.
"""

from collections.abc import Iterable

import msgspec

from prfaas.capacity.builtin import builtin_names, read_builtin
from prfaas.capacity.profile import Curve, Sample
from prfaas.errors import ConfigError
from prfaas.wire.profile import Profile
from prfaas_operator.errors import ProfileNotFoundError
from prfaas_operator.plan.pool_status import PoolObject


def check_profile(pool: PoolObject) -> None:
    """Raise ProfileNotFoundError for the name of a built-in profile that this version does not have."""
    if pool.spec.profile is not None and pool.spec.profile.builtin is not None:
        try:
            read_builtin("spec.profile.builtin", pool.spec.profile.builtin)
        except ConfigError as error:
            raise ProfileNotFoundError(str(error)) from error


def seeds(pools: Iterable[PoolObject]) -> dict[str, Profile]:
    """Return the seed of every pool that says something, by the pool's name."""
    found = {pool.metadata.name: seed for pool in pools if (seed := _seed(pool)) is not None}
    sized = next((one for one in found.values() if one.token_bytes or one.state_bytes), None)
    if sized is None:
        return found
    size = {"token_bytes": sized.token_bytes, "state_bytes": sized.state_bytes}
    return {
        name: one if one.token_bytes or one.state_bytes else msgspec.structs.replace(one, **size)
        for name, one in found.items()
    }


def _seed(pool: PoolObject) -> Profile | None:
    spec = pool.spec.profile
    if spec is None:
        return None
    if spec.builtin is not None:
        # The pool itself says that its profile is unknown. The others still have theirs.
        return read_builtin("", spec.builtin).profile() if spec.builtin in builtin_names() else None
    samples = [Sample(point.tokens, point.prefill_millis / 1000) for point in spec.points]
    return Curve.fitted(samples).profile(spec.state_bytes or 0, spec.token_bytes or 0)
