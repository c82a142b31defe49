"""Says once that something fails, and once that it works again, however often it is tried in between."""

import logging

log = logging.getLogger(__name__)


class Trouble:
    """What fails at present, by the name of the thing that was tried."""

    def __init__(self) -> None:
        self._failing: dict[str, type[Exception]] = {}

    def failed(self, what: str, error: Exception) -> None:
        """Log the failure, unless the last try of `what` failed in the same way."""
        if self._failing.get(what) is not type(error):
            self._failing[what] = type(error)
            log.warning("%s failed: %s", what, error)

    def worked(self, what: str) -> None:
        """Log that `what` works again, if it did not before."""
        if self._failing.pop(what, None) is not None:
            log.info("%s works again", what)
