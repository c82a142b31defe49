"""What the processes inside tell the host: one JSON object a line, on their common standard output."""

import json
import sys
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Message:
    """One line.

    Args:
        sender: hub, member or sandbox.
        kind: `progress`, `ready` or `failed`.
        text: for people.

    """

    sender: str
    kind: str
    text: str = ""

    def send(self) -> None:
        """Write the line at once; lines of several processes do not mix, as a pipe takes small writes whole."""
        sys.stdout.write(json.dumps(asdict(self)) + "\n")
        sys.stdout.flush()


def parse(line: bytes) -> Message:
    """Return the message of a line."""
    return Message(**json.loads(line))
