"""Where a prompt may travel, in Python; on the wire it is one header (prfaas.wire.preferences)."""

from prfaas.wire.preferences import check_datacenters, write_datacenters


class Places:
    """Datacenters to prefer, best first, and to forbid. A name covers what lies in it: `us` covers us-east-1.

    Raises:
        RequestError: what is no name, or is both preferred and forbidden.

    """

    def __init__(self, prefer: tuple[str, ...] = (), forbid: tuple[str, ...] = ()):
        check_datacenters(prefer, forbid)
        self._prefer = prefer
        self._forbid = forbid

    def prefer(self, *names: str) -> "Places":
        """Return these places with further datacenters to prefer, after those already named."""
        return Places((*self._prefer, *names), self._forbid)

    def forbid(self, *names: str) -> "Places":
        """Return these places with further datacenters to forbid."""
        return Places(self._prefer, (*self._forbid, *names))

    def __str__(self) -> str:
        return write_datacenters(self._prefer, self._forbid)


class Prefer(Places):
    """Prefer these datacenters, best first."""

    def __init__(self, *names: str):
        super().__init__(prefer=names)


class Forbid(Places):
    """Forbid these datacenters."""

    def __init__(self, *names: str):
        super().__init__(forbid=names)
