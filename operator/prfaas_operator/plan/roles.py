"""Which instance of a shared Deployment prefills, which decodes, and which goes first when there are too many.

Two pools want `wanted.prefill` and `wanted.decode` of the same pods; the roles are labels, and the Deployment's
controller knows nothing of them. It takes pods away by rules of its own: those of an older template in a rollout, then
those that are not ready, and only among ready ones the cheaper first. So roles are planned anew from what exists,
whenever that changes, in an order that makes as few ready pods change sides as there must:

    1. pods of the present template keep their role as far as it is wanted, ready ones first
    2. pods without a role take what is missing, decode first; in a rollout an older pod of that role becomes cheap
    3. older pods keep their role as far as it is still wanted
    4. what is missing then is taken from a role that has too many: pods that are not ready before ready ones
    5. whoever is left keeps its role, and is cheap

Where all pods are of one template and too many, those that are not ready go whatever their cost; they are left out
from the start. And decode comes before everything else: without a ready decode instance nothing is served, whereas one
that decodes can prefill too, so that a ready prefill instance takes its place.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from prfaas.wire.routes import Role
from prfaas_operator.plan.pods import PodFacts


class Wanted(NamedTuple):
    """How many instances of each role both pools together want."""

    prefill: int
    decode: int

    @property
    def total(self) -> int:
        """Pods of the Deployment."""
        return self.prefill + self.decode

    def of(self, role: Role) -> int:
        """Return the number for one role."""
        return self.prefill if role == "prefill" else self.decode


class Assignment(NamedTuple):
    """What one pod should carry. Without a role its gate stays shut; a cheap one goes first."""

    pod: PodFacts
    role: Role | None
    cheap: bool

    @property
    def converts(self) -> bool:
        """Whether an instance that has a role gets the other one."""
        return bool(self.pod.role) and self.role is not None and self.pod.role != self.role

    @property
    def labels_differ(self) -> bool:
        """Whether the pod's labels and annotations are to be written."""
        return (self.role or "", self.cheap) != (self.pod.role, self.pod.seat.cheap)

    @property
    def gate_differs(self) -> bool:
        """Whether the pod's gate is to be opened."""
        return self.role is not None and self.pod.seat.gated and not self.pod.seat.gate_open


def assign(pods: Iterable[PodFacts], wanted: Wanted, template: str) -> tuple[Assignment, ...]:
    """Return what each pod that is not ending should carry.

    Args:
        pods: of one shared Deployment.
        wanted: by both pools.
        template: digest of the present pod template; pods of another one are being replaced.

    """
    alive = sorted((pod for pod in pods if not pod.terminating and not pod.seat.over), key=_worth)
    present = [pod for pod in alive if pod.seat.template == template]
    older = [pod for pod in alive if pod.seat.template != template]
    going = set() if older else _first_to_go(present, len(present) - wanted.total)
    staying = [pod for pod in present if pod.name not in going]
    roles = _roles(staying, older, wanted)
    rescuer = _rescuer([*staying, *older], roles) if wanted.decode else None
    if rescuer is not None and (rescuer.name in roles or rescuer in staying):
        roles = _roles(staying, older, wanted, rescuer)
    return tuple(_assignment(pod, roles.get(pod.name), decodes=pod == rescuer) for pod in alive)


def _rescuer(pods: Sequence[PodFacts], roles: Mapping[str, Role]) -> PodFacts | None:
    """Return a ready pod that must decode because no other ready one does: one that is left over, if there is any.

    An older one does so beside what comes in a rollout, which would wait for a role otherwise; all others in a seat.
    """
    ready = [pod for pod in pods if pod.ready]
    if any(roles.get(pod.name, pod.role) == "decode" for pod in ready):
        return None
    return min(ready, key=lambda pod: (pod.name in roles, pod.role != "decode"), default=None)


def _roles(
    present: Sequence[PodFacts], older: Sequence[PodFacts], wanted: Wanted, rescuer: PodFacts | None = None
) -> dict[str, Role]:
    """Return roles by pod, in the order that the module's docstring gives; the rescuer decodes whatever else."""
    plan = _Plan(wanted)
    if rescuer is not None:
        plan.give(rescuer, "decode")
    plan.keep(present)
    plan.fill([pod for pod in present if not pod.role])
    plan.keep(older)
    plan.convert(present)
    plan.convert(older)
    return plan.roles


def _worth(pod: PodFacts) -> tuple[bool, str, str]:
    """Order by whom to keep: ready before unready, then the oldest, whose cache has seen most."""
    return not pod.ready, pod.seat.created, pod.name


def _first_to_go(pods: Sequence[PodFacts], too_many: int) -> set[str]:
    """Return the pods that a ReplicaSet takes whatever their cost: those that are not ready, the youngest first."""
    unready = [pod.name for pod in pods if not pod.ready]
    return set(unready[max(0, len(unready) - too_many) :]) if too_many > 0 else set()


def _assignment(pod: PodFacts, role: Role | None, *, decodes: bool) -> Assignment:
    return Assignment(pod, "decode" if decodes else role or _role_of(pod), cheap=role is None)


def _role_of(pod: PodFacts) -> Role | None:
    return "prefill" if pod.role == "prefill" else "decode" if pod.role == "decode" else None


class _Plan:
    """Roles by pod as they are given out, and what is still missing."""

    def __init__(self, wanted: Wanted):
        self.roles: dict[str, Role] = {}
        self._wanted = wanted
        self._missing: dict[Role, int] = {"decode": wanted.decode, "prefill": wanted.prefill}

    def keep(self, pods: Iterable[PodFacts]) -> None:
        """Let pods keep their role as far as it is wanted."""
        for pod in pods:
            role = _role_of(pod)
            if role:
                self.give(pod, role)

    def fill(self, pods: Iterable[PodFacts]) -> None:
        """Give what is missing to pods that have no role: the first decode instance, then the role that lacks most."""
        for pod in pods:
            nobody_decodes = self._missing["decode"] == self._wanted.decode
            decode_lacks_most = self._missing["decode"] >= self._missing["prefill"]
            decode = self._missing["decode"] and (nobody_decodes or decode_lacks_most)
            self.give(pod, "decode" if decode else "prefill")

    def convert(self, pods: Sequence[PodFacts]) -> None:
        """Take what is missing from pods that were left over: those that are not ready first, then the youngest."""
        for pod in sorted(pods, key=_worth, reverse=True):
            self.give(pod, "decode" if self._missing["decode"] else "prefill")

    def give(self, pod: PodFacts, role: Role) -> None:
        """Give a pod without one a role, if it is missing."""
        if self._missing[role] and pod.name not in self.roles:
            self._missing[role] -= 1
            self.roles[pod.name] = role
