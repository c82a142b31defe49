"""The system that serves: offload pools behind links, and the hub's instances that may prefill or decode.

These are facts about machines, as a planner, a simulator or a control loop needs them. How many of the hub's instances
prefill is a decision and stands in a plan. Each pool is of one hardware kind; kinds differ in their profiles.
"""

from collections.abc import Iterable
from typing import Final

import msgspec

from prfaas.capacity.memory import InstanceMemory
from prfaas.capacity.profile import prefill_seconds
from prfaas.errors import ConfigError
from prfaas.wire.profile import Profile

NEVER_PREFILLS: Final = Profile(state_bytes=1, token_bytes=1, fixed_seconds=1.0)
"""Stands for the profile of instances that only decode and were never measured. No equation asks for it."""


class LinkCapacity(msgspec.Struct, frozen=True, kw_only=True):
    """The path from a member cluster to the hub. Pools of the same cluster share it."""

    name: str
    capacity_mbps: float


class OffloadPool(msgspec.Struct, frozen=True, kw_only=True):
    """Instances in a member cluster that only prefill; their caches leave over `link`."""

    name: str
    profile: Profile
    instances: int
    link: str
    cost_per_hour: float | None = None
    """Of one instance, in the one currency of all pools; None: not known."""
    memory: InstanceMemory | None = None
    model: str = ""
    """Of the cache, by a name in models.MODEL_CACHES; empty: not known."""
    builtin: str = ""
    """Name of the built-in profile; empty: it is none."""


class HubPool(msgspec.Struct, frozen=True, kw_only=True):
    """Instances of one kind in the hub, each of which prefills or decodes.

    A decoding one holds `max_batch` requests, BS_max, and gives each a token every `step_seconds`, T_decode. Of the
    instances at least `min_prefill` prefill and at least `min_decode` decode.
    """

    name: str
    profile: Profile
    instances: int
    max_batch: int
    step_seconds: float
    min_prefill: int = 0
    min_decode: int = 0
    cost_per_hour: float | None = None
    memory: InstanceMemory | None = None
    model: str = ""
    builtin: str = ""

    def decode_rate(self, output_tokens: float) -> float:
        """Requests a second that one instance decodes: BS_max / (T_decode L_out)."""
        return self.max_batch / (self.step_seconds * output_tokens)


class System(msgspec.Struct, frozen=True, kw_only=True):
    """One hub, with what offloads for it. `output_tokens` is L_out, the mean length of an answer."""

    links: tuple[LinkCapacity, ...]
    offload: tuple[OffloadPool, ...]
    hub: tuple[HubPool, ...]
    output_tokens: float

    def link(self, name: str) -> LinkCapacity:
        """Return the link of this name; `check` has seen that there is one."""
        return next(link for link in self.links if link.name == name)

    @property
    def offload_instances(self) -> int:
        """N_prfaas: instances of all offload pools."""
        return sum(pool.instances for pool in self.offload)

    @property
    def hub_instances(self) -> int:
        """Instances of the hub, N_p + N_d."""
        return sum(pool.instances for pool in self.hub)


def check(system: System) -> System:
    """Return the system if it can serve; else raise ConfigError, whose message names field, value and fix."""
    _check_names("links", (link.name for link in system.links))
    _check_names("offloadPools", (pool.name for pool in system.offload))
    _check_names("hub", (pool.name for pool in system.hub))
    _positive("workload.outputTokens", system.output_tokens, "give the mean number of tokens of an answer")
    for link in system.links:
        _positive(f"links.{link.name}.capacityMbps", link.capacity_mbps, "give what the link carries, in Mbit/s")
    names = [link.name for link in system.links]
    for pool in system.offload:
        where = f"offloadPools.{pool.name}"
        check_profile(f"{where}.profile", pool.profile)
        if pool.link not in names:
            raise ConfigError(f"{where}.link is {pool.link!r}; links are: {', '.join(names) or 'none'}")
    if not system.hub_instances:
        raise ConfigError("hub has no instances, so nothing would decode; give one of its pools at least one")
    for pool in system.hub:
        _check_hub_pool(pool)
    if all(pool.min_prefill == pool.instances for pool in system.hub):
        raise ConfigError("hub: every instance must prefill, so none can decode; lower minPrefill of a pool")
    if not system.offload_instances and all(pool.min_decode == pool.instances for pool in system.hub):
        raise ConfigError(
            "hub: no instance may prefill, and no offload pool has instances; "
            f"the hub has {system.hub_instances} instances: raise instances, lower minDecode, or add an offload pool"
        )
    return system


def present(system: System) -> System:
    """Return the system without the pools that have no instances."""
    return msgspec.structs.replace(
        system,
        offload=tuple(pool for pool in system.offload if pool.instances),
        hub=tuple(pool for pool in system.hub if pool.instances),
    )


def in_use(system: System) -> System:
    """Return the system without pools that have no instances, and links that no other pool uses."""
    system = present(system)
    used = {pool.link for pool in system.offload}
    return msgspec.structs.replace(system, links=tuple(link for link in system.links if link.name in used))


def check_profile(where: str, profile: Profile) -> None:
    """Refuse a profile that is empty, falls with the length, or is in another unit."""
    for name in ("fixed_seconds", "token_seconds", "squared_seconds", "state_bytes", "token_bytes"):
        value = getattr(profile, name)
        if not 0 <= value < 1e15:
            raise ConfigError(
                f"{where}.{name} is {value:g}: a prefill's time and cache never fall with its length; give 0 or more"
            )
    if prefill_seconds(profile, 1) < 1e-12:
        raise ConfigError(f"{where} has no seconds: measure some prefills, or give fixedSeconds and tokenSeconds")
    if profile.state_bytes + profile.token_bytes == 0:
        raise ConfigError(f"{where} has no cache: give stateBytes and tokenBytes")
    if profile.fixed_seconds > 60 or profile.token_seconds > 1:
        raise ConfigError(
            f"{where} says {profile.fixed_seconds:g} s a prefill and {profile.token_seconds:g} s a token: "
            "these look like milliseconds; give seconds"
        )
    if profile.token_bytes > 1 << 26:
        raise ConfigError(
            f"{where}.tokenBytes is {profile.token_bytes}: no cache is that large; give bytes of one token"
        )


def _check_hub_pool(pool: HubPool) -> None:
    where = f"hub.{pool.name}"
    _positive(f"{where}.maxBatch", pool.max_batch, "give how many requests an instance decodes together")
    _positive(f"{where}.stepMillis", pool.step_seconds * 1000, "give the milliseconds of a decode step")
    if pool.step_seconds > 10:
        raise ConfigError(
            f"{where}.stepMillis is {pool.step_seconds * 1000:g}: a decode step of more than 10 s; give milliseconds"
        )
    if pool.min_prefill < 0 or pool.min_decode < 0 or pool.min_prefill + pool.min_decode > pool.instances:
        raise ConfigError(
            f"{where}: minPrefill {pool.min_prefill} and minDecode {pool.min_decode} do not fit into "
            f"{pool.instances} instances; lower one"
        )
    check_profile(f"{where}.profile", pool.profile)


def _check_names(field: str, names: Iterable[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if not name or name in seen:
            raise ConfigError(f"{field}: the name {name!r} is empty or there twice; give each its own")
        seen.add(name)


def _positive(where: str, value: float, fix: str) -> None:
    if not 1e-6 <= value < 1e12:
        raise ConfigError(f"{where} is {value:g}; it must be above 0, within 1e-6 and 1e12: {fix}")
