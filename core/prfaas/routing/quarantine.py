"""Keeps a request that may kill engines from the others: it is sent to no third one.

An engine that dies takes the connections of all its requests with it, and a router that sends them again would kill one
engine after the other, if one of them was the cause. One loss says nothing. A request that lost two connections is
refused, and for a minute so is each request with the same digest: clients repeat what failed.

A request may also kill by its second token. So a stream that its engine ended counts, too, if it was served there for
less than PROBATION_SECONDS. Who was served for longer got what the engine is for: that two engines of a long stream die
says nothing of it, and the count begins anew. Of streams that run at once with the same digest each ends with its first
loss once the digest is refused.

A client can send the same again with one letter more. So a client of a key whose requests are refused at two times
within a minute is refused as a whole for a minute. What it loses within five seconds is one loss: a node that fails
takes many instances and says nothing of a client. Without keys nobody is refused as a whole: all clients may come from
one address, that of a proxy.

A request that was beside the cause twice is refused, too, and may come back after that minute. Each gateway counts for
itself, and a client that leaves after the first loss is not counted.
"""

from collections import OrderedDict
from typing import Any, Final

LOSSES: Final = 2
"""Connections that one request may lose."""
PROBATION_SECONDS: Final = 4.0
"""For how long after an answer began its engine may have died of it. A connection to a node that fell silent ends
later, and so never counts."""
CLIENT_LOSSES: Final = 2
"""How often requests of one client may be refused within QUARANTINE_SECONDS."""
SAME_LOSS_SECONDS: Final = 5.0
"""What one client loses within this time is one loss, however many its requests and instances are."""
QUARANTINE_SECONDS: Final = 60.0
MAX_REFUSED: Final = 1024


class Quarantine:
    """The digests of requests that lost too many connections, and their clients. The clock is the caller's, a
    monotonic one."""

    def __init__(self) -> None:
        self._until_seconds: OrderedDict[bytes | str, float] = OrderedDict()
        self._losses: OrderedDict[str, list[float]] = OrderedDict()
        """By client: when its requests were refused."""

    def __bool__(self) -> bool:
        return bool(self._until_seconds)

    def add(self, digest: bytes, client: str, now_seconds: float) -> bool:
        """Refuse a request from now on; return whether its client is refused, too.

        `client` is that of a key, or empty. Beyond MAX_REFUSED the oldest request or client is free again.
        """
        self._refuse(digest, now_seconds)
        if not client:
            return False
        losses = [one for one in self._losses.get(client, ()) if now_seconds - one < QUARANTINE_SECONDS]
        if not losses or now_seconds - losses[-1] >= SAME_LOSS_SECONDS:
            losses.append(now_seconds)
        self._losses[client] = losses
        _bound(self._losses, client)
        if len(losses) < CLIENT_LOSSES:
            return False
        self._refuse(client, now_seconds)
        return True

    def left_seconds(self, refused: bytes | str, now_seconds: float) -> float:
        """Return for how long a digest or a client is refused; 0: it is not."""
        while self._until_seconds and next(iter(self._until_seconds.values())) <= now_seconds:
            self._until_seconds.popitem(last=False)
        return max(0.0, self._until_seconds.get(refused, now_seconds) - now_seconds)

    def _refuse(self, one: bytes | str, now_seconds: float) -> None:
        self._until_seconds[one] = now_seconds + QUARANTINE_SECONDS
        _bound(self._until_seconds, one)


def _bound(kept: OrderedDict[Any, Any], newest: bytes | str) -> None:
    kept.move_to_end(newest)
    if len(kept) > MAX_REFUSED:
        kept.popitem(last=False)
