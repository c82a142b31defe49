"""PeerCredentials of two clusters, and connected sockets between them."""

import datetime
import itertools
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from prfaas import identity
from prfaas.identity import KeyPair
from prfaas_transfer.credentials import PeerCredentials

from .mounts import Mount

NOW = datetime.datetime.now(datetime.UTC)
YEAR = identity.valid_for(NOW, 365)


@pytest.fixture(scope="session")
def authority() -> KeyPair:
    return identity.make_authority("first", YEAR)


@pytest.fixture(scope="session")
def other() -> KeyPair:
    return identity.make_authority("second", YEAR)


@pytest.fixture
def mount(tmp_path: Path, authority: KeyPair) -> Callable[..., Mount]:
    """Make a mount for a cluster: of the first authority by default."""

    numbers = itertools.count()

    def make(cluster: str, signer: KeyPair | None = None, trusts: tuple[KeyPair, ...] = ()) -> Mount:
        signer = signer or authority
        return Mount(tmp_path / f"{cluster}-{next(numbers)}").put(
            identity.issue(signer, cluster, YEAR), *(trusts or (signer,))
        )

    return make


@pytest.fixture
def hub(mount: Callable[..., Mount]) -> PeerCredentials:
    return PeerCredentials(mount("hub").path)


@pytest.fixture
def eu(mount: Callable[..., Mount]) -> PeerCredentials:
    return PeerCredentials(mount("eu").path)


@pytest.fixture
def sockets() -> Iterator[Callable[[], tuple[socket.socket, socket.socket]]]:
    """Make connected TCP sockets: (client's, server's)."""
    made: list[socket.socket] = []

    def connect() -> tuple[socket.socket, socket.socket]:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            client = socket.create_connection(listener.getsockname())
            server, _ = listener.accept()
        made.extend((client, server))
        return client, server

    yield connect
    for sock in made:
        sock.close()
