"""What waits before each prefill instance and link, as whoever places requests can know it without asking anybody.

Each request that is placed adds its estimated seconds of prefill to an instance and its bits to a link, and takes both
away when its first token is there. In between nothing is heard of it, so what is left of them has to be guessed, and
there are two guesses. A virtual server that works through what it was given from the moment it was given forgets what
takes longer than estimated; the sum of what has not answered yet still counts what is long computed and only waits for
the link. The smaller of the two is taken.
"""

from collections.abc import Hashable

import msgspec


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """What one request asks of a prefill instance, and of the link behind which that stands; at home there is none."""

    seconds: float
    link: str = ""
    bits: float = 0.0
    mbps: float = 0.0
    """What the link carries."""


class Backlog:
    """All instances and links that one gateway places requests on. Times are of any one monotonic clock."""

    def __init__(self) -> None:
        self._placed: dict[Hashable, tuple[str, Work]] = {}
        self._instances: dict[str, _Line] = {}
        self._links: dict[str, _Line] = {}

    def __len__(self) -> int:
        return len(self._placed)

    def add(self, request: Hashable, instance: str, work: Work, now_seconds: float) -> None:
        """Place a request that is placed nowhere yet."""
        self._placed[request] = instance, work
        self._instances.setdefault(instance, _Line()).add(work.seconds, now_seconds, 1.0)
        if work.link:
            self._links.setdefault(work.link, _Line()).add(work.bits, now_seconds, work.mbps * 1e6)

    def remove(self, request: Hashable) -> None:
        """Take a request away, if it is placed: its cache is where it should be, or it is over."""
        if request not in self._placed:
            return
        instance, work = self._placed.pop(request)
        if self._instances[instance].remove(work.seconds):
            del self._instances[instance]
        if work.link and self._links[work.link].remove(work.bits):
            del self._links[work.link]

    def waiting_seconds(self, instance: str, now_seconds: float) -> float:
        """Return how long a request that comes now waits for an instance."""
        line = self._instances.get(instance)
        return line.left(now_seconds, 1.0) if line else 0.0

    def waiting_requests(self, instance: str) -> int:
        """Return how many requests are placed on an instance."""
        line = self._instances.get(instance)
        return line.count if line else 0

    def waiting_bits(self, link: str, now_seconds: float, mbps: float) -> float:
        """Return what is to cross a link, which carries `mbps`, before a request that comes now."""
        line = self._links.get(link)
        return line.left(now_seconds, mbps * 1e6) if line else 0.0


class _Line:
    """What waits for one server: an instance that computes a second a second, or a link that carries bits."""

    def __init__(self) -> None:
        self.count = 0
        self._sum = 0.0
        self._left = 0.0
        self._since_seconds = 0.0

    def left(self, now_seconds: float, speed: float) -> float:
        """Return what is left to do, when `speed` of it is done a second."""
        done = speed * (now_seconds - self._since_seconds)
        self._left, self._since_seconds = max(0.0, min(self._left - done, self._sum)), now_seconds
        return self._left

    def add(self, amount: float, now_seconds: float, speed: float) -> None:
        """Take more."""
        self._left = self.left(now_seconds, speed) + amount
        self._sum += amount
        self.count += 1

    def remove(self, amount: float) -> bool:
        """Forget one that was added; True when nothing is left."""
        self._sum -= amount
        self.count -= 1
        return self.count == 0
