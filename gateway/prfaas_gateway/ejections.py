"""Instances that failed lately, and until when they are left alone.

Between two routing tables the gateway is the first to notice a dead instance, and must not wait for an operator that
may be down. An ejection ends by itself, half-open: the first request afterwards tries the instance while the others
still go elsewhere; its success readmits the instance, its failure doubles the ejection.
"""

from collections.abc import Mapping, Set
from dataclasses import dataclass


@dataclass(slots=True)
class _Record:
    failures: int = 0
    probing: bool = False


class Ejections:
    """The one owner of what the gateway has seen fail.

    Args:
        first_seconds: length of a first ejection.
        max_seconds: bound of the doubling.

    """

    def __init__(self, first_seconds: float, max_seconds: float):
        self._first_seconds = first_seconds
        self._max_seconds = max_seconds
        self._records: dict[str, _Record] = {}
        self._until_seconds: dict[str, float] = {}

    @property
    def until_seconds(self) -> Mapping[str, float]:
        """End of every ejection by instance; a live view."""
        return self._until_seconds

    def starting(self, name: str, now_seconds: float) -> None:
        """A request goes to this instance. If its ejection just ended, the next requests wait for the result."""
        record = self._records.get(name)
        if record is not None:
            record.probing = True
            self._until_seconds[name] = now_seconds + self._first_seconds

    def failed(self, name: str, now_seconds: float) -> None:
        """A request failed here. Of many that fail at once the first counts."""
        record = self._records.setdefault(name, _Record())
        if self._until_seconds.get(name, now_seconds) > now_seconds and not record.probing:
            return
        record.failures += 1
        record.probing = False
        length_seconds = min(self._max_seconds, self._first_seconds * 2 ** min(record.failures - 1, 16))
        self._until_seconds[name] = now_seconds + length_seconds

    def succeeded(self, name: str) -> None:
        """A request was served here."""
        if self._records.pop(name, None) is not None:
            del self._until_seconds[name]

    def keep_only(self, names: Set[str]) -> None:
        """Forget all other instances: a pod that comes back under its name starts afresh."""
        for name in self._records.keys() - names:
            self.succeeded(name)
