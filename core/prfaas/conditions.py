"""The content of a condition in an object's status, which the operator and the scheduler both write."""

from typing import Literal, NamedTuple


class ConditionState(NamedTuple):
    """The state of one condition, without its transition time."""

    status: Literal["True", "False", "Unknown"]
    reason: str
    message: str

    @property
    def good(self) -> bool:
        return self.status == "True"
