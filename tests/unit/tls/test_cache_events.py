"""Cache events leave a mover inside mutual TLS alone: to whoever shows a certificate of the hub, and by the gateway's
own client to the cluster that its table names.
"""

import asyncio
import gc
import warnings
from collections.abc import Callable, Iterator

import pytest
from tests.tables import make_instance

from prfaas.errors import UnreachableError
from prfaas.kvindex.index import InstanceIndex
from prfaas_gateway.kv.cache_events import NoStreamError
from prfaas_gateway.kv.mover_events import MoverEventStream
from prfaas_gateway.limits import Limits
from prfaas_gateway.upstream import GatewayCredentials, Upstream

from ..transfer.engines import Engine
from ..transfer.patience import start_patient_movers
from ..transfer.test_events import batch
from ..transfer.test_events_snapshot import stored
from .mounts import Mount

pytestmark = pytest.mark.system


@pytest.fixture
def engine(mount: Callable[..., Mount], monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    """An engine of the cluster eu, which has something cached."""
    start_patient_movers(monkeypatch)
    made = Engine(tls_dir=str(mount("eu").path), cluster="eu")
    made.mover.events.append("kv", batch(stored(0, 2)))
    yield made
    made.mover.close()


async def read(engine: Engine, credentials: Mount | None, cluster: str = "eu", scheme: str = "https") -> int:
    """Follow the engine until its first batch; return how many blocks it has cached."""
    port, index = engine.mover.data_port, InstanceIndex(100, 100)
    instance = make_instance("x0", url=f"{scheme}://127.0.0.1:{port + 1}", cluster=cluster, data_port=port)
    async with Upstream(Limits(), GatewayCredentials(credentials.path) if credentials else None) as upstream:
        stream = MoverEventStream(instance, 0, index, upstream)
        portions = stream.portions()
        while not stream.tally[0]:
            list(await anext(portions))
        await portions.aclose()
    return len(index.tree)


async def test_a_member_reads_no_events_not_even_of_its_own_cluster(engine: Engine, mount):
    with pytest.raises(NoStreamError, match="HTTP 403"):
        await read(engine, mount("eu"))


async def test_only_a_certificate_of_the_installation_opens_the_events_of_the_cluster_that_is_meant(
    engine: Engine, mount, other
):
    assert await read(engine, mount("hub")) == 2
    with pytest.raises(UnreachableError, match="'us' was expected"):
        await read(engine, mount("hub"), cluster="us")
    for stranger, scheme in ((mount("hub", signer=other), "https"), (None, "http")):
        with pytest.raises(UnreachableError):
            await read(engine, stranger, scheme=scheme)


def test_a_stream_that_is_left_leaves_no_connection_open(engine: Engine, mount):
    """A mover only writes: TLS would wait half a minute for its goodbye."""
    gc.collect()
    with warnings.catch_warnings(record=True) as unclosed:
        warnings.simplefilter("always", ResourceWarning)
        assert asyncio.run(read(engine, mount("hub"))) == 2
        gc.collect()
    assert [str(one.message) for one in unclosed] == []
