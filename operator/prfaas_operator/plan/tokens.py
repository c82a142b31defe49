"""Tokens of ServiceAccounts: whose one is, when it ends, and when the next is due.

A token says both itself, in the payload of its JWT. What it says is taken for what it is only about our own
credential, never as a proof. Lifetimes are read from the token and never from what was asked for: an API server may
grant less.
"""

import base64
import binascii
import json
from datetime import UTC, datetime, timedelta
from typing import Any, Final, NamedTuple

DEFAULT_TOKEN_DAYS: Final = 30
"""Renewed at half its life, a token outlives an outage of half that: two weeks."""
SECONDS_PER_DAY: Final = 86_400
SUBJECT: Final = "system:serviceaccount:"
PARTS_OF_A_JWT: Final = 3


class TokenFacts(NamedTuple):
    """A ServiceAccount's token, as it describes itself."""

    namespace: str
    account: str
    issued_at: datetime
    expires_at: datetime

    @property
    def lifetime(self) -> timedelta:
        """How long it was granted for."""
        return self.expires_at - self.issued_at


def read(token: str) -> TokenFacts | None:
    """Return what a token says of itself; None for one that never ends, or is not a ServiceAccount's."""
    payload = _payload(token)
    subject = str(payload.get("sub", ""))
    namespace, _, account = subject.removeprefix(SUBJECT).partition(":")
    issued, expires = payload.get("iat"), payload.get("exp")
    if not subject.startswith(SUBJECT) or not isinstance(issued, int) or not isinstance(expires, int):
        return None
    try:
        return TokenFacts(namespace, account, datetime.fromtimestamp(issued, UTC), datetime.fromtimestamp(expires, UTC))
    except (ValueError, OverflowError, OSError):
        return None


def _payload(token: str) -> dict[str, Any]:
    parts = token.split(".")
    if len(parts) != PARTS_OF_A_JWT:
        return {}
    try:
        payload = json.loads(base64.urlsafe_b64decode(parts[1] + "=" * (-len(parts[1]) % 4)))
    except (binascii.Error, ValueError, RecursionError):
        return {}
    return payload if isinstance(payload, dict) else {}


def is_due(facts: TokenFacts, now: datetime) -> bool:
    """Tell whether half of a token's life is over."""
    return now >= facts.issued_at + facts.lifetime / 2


def has_expired(facts: TokenFacts | None, now: datetime) -> bool:
    """Tell whether a token has an end that is past."""
    return facts is not None and now >= facts.expires_at
