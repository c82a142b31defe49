"""Directories of credentials as Kubernetes mounts them."""

from pathlib import Path

from prfaas import identity
from prfaas.identity import KeyPair


class Mount:
    """A directory of credentials whose files change all at once, as a Secret's do: `..data` is swapped."""

    def __init__(self, path: Path):
        self.path = path
        self._number = 0

    def put(self, pair: KeyPair, *authorities: KeyPair) -> "Mount":
        """Replace all files."""
        bundle = identity.bundle(*(authority.certificate for authority in authorities))
        return self.put_files({"tls.crt": pair.certificate, "tls.key": pair.key, "ca.crt": bundle})

    def put_files(self, files: dict[str, bytes]) -> "Mount":
        """Replace all files by any bytes."""
        self._number += 1
        new = self.path / f"..{self._number}"
        new.mkdir(parents=True)
        for name, content in files.items():
            (new / name).write_bytes(content)
            if not (self.path / name).is_symlink():
                (self.path / name).symlink_to(Path("..data") / name)
        swap = self.path / "..swap"
        swap.symlink_to(new.name)
        swap.rename(self.path / "..data")
        return self
