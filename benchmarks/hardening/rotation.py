"""What clients lose when all certificates are replaced: an hour's six rotations in two minutes, under load.

A gateway, an instance of the hub that decodes, and one of another cluster that prefills long prompts; the steps of
their engines are emulated, all else is real and inside TLS. Time runs thirty times as fast as for certificates of a
quarter of an hour: they live for 30 s, and every 20 s all of them are replaced and their authority as well, by the
three steps of docs/operate/tls.md. Each step reaches one holder after the other, as kubelets bring it; a gateway holds
a request for as long as that takes for one of them. The rival is one rotation more, in one step.
"""

import asyncio
import itertools
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final, NamedTuple

import aiohttp
import msgspec
from benchmarks.emulated import as_measured
from benchmarks.gateway.routers import serving
from benchmarks.hardening.overload import BATCH, FLAGS, PROFILE, STEP_SECONDS
from benchmarks.report import Figure, say
from tests.tables import make_instance, make_table
from tests.unit.tls.mounts import Mount
from tests.unit.worker.conftest import launched

from prfaas import identity
from prfaas.identity import KeyPair
from prfaas.names import HUB
from prfaas.rights import GATEWAY, WORKER, Identity
from prfaas.wire import headers
from prfaas.wire.routes import Cluster

EU: Final = "eu"
DECODES, PREFILLS, RELAYS = HOLDERS = (Identity(HUB, WORKER), Identity(EU), Identity(HUB, GATEWAY))
ROTATIONS: Final = 6
LIFE, EVERY_SECONDS, LATE_SECONDS = timedelta(seconds=30), 20.0, 2.0
LONG_LIFE: Final = timedelta(hours=12)
"""Of the first certificates: nobody knows how long workers take to start."""
CLIENTS: Final = 4
IN_ONE_STEP: Final = "one rotation in one step"
LONG, SHORT, THRESHOLD = 2000, 100, 1000
"""Tokens: the model's are characters."""
PATIENCE_SECONDS: Final = 30.0


class Reply(NamedTuple):
    """What became of a request: whether its whole answer came, and whether it was prefilled where it belongs."""

    is_whole: bool
    is_in_place: bool


class Secrets:
    """The directories of all holders, and who signs."""

    def __init__(self, folder: Path):
        self._made = itertools.count()
        self._signer = self._authority()
        self.mounts = {who: Mount(folder / f"tls-{number}") for number, who in enumerate(HOLDERS)}
        self._pairs: dict[Identity, KeyPair] = {}
        for who in HOLDERS:
            self._put(who, self._signer, life=LONG_LIFE)

    def _authority(self) -> KeyPair:
        return identity.make_authority(f"bench {next(self._made)}", identity.valid_for(datetime.now(UTC), 1))

    def _put(self, who: Identity, *trusted: KeyPair, life: timedelta | None) -> None:
        if life is not None:
            now = datetime.now(UTC).replace(microsecond=0)
            self._pairs[who] = identity.issue(self._signer, who.cluster, identity.Validity(now, now + life), who.part)
        self.mounts[who].put(self._pairs[who], *trusted)

    async def _deliver(self, *trusted: KeyPair, life: timedelta | None = None) -> None:
        """Write all Secrets one after the other; without a life the certificates stay."""
        for who in HOLDERS:
            self._put(who, *trusted, life=life)
            await asyncio.sleep(LATE_SECONDS)

    async def rotate(self) -> None:
        """Replace all certificates and their authority, a step after the other."""
        former, following = self._signer, self._authority()
        await self._deliver(former, following)
        self._signer = following
        await self._deliver(former, following, life=LIFE)
        await self._deliver(following)

    async def replace_at_once(self) -> None:
        """Replace all of it in one step."""
        self._signer = self._authority()
        await self._deliver(self._signer, life=LIFE)


class Load:
    """Clients that ask a gateway without a pause; every second prompt belongs into the other cluster, and every fifth
    answer is long."""

    def __init__(self, url: str):
        self._url = url
        self._numbers = itertools.count()
        self.replies: list[Reply] = []

    async def _ask_on(self, session: aiohttp.ClientSession) -> None:
        while True:
            number = next(self._numbers)
            is_long, text = number % 2 == 0, f"{number} {'x' * (SHORT if number % 2 else LONG)}"
            fields = {"max_tokens": 200 if number % 5 == 0 else 8, "stream": number % 3 == 0, "ignore_eos": True}
            body = {"model": "tiny", "messages": [{"role": "user", "content": text}], **fields}
            self.replies.append(await self._ask(session, msgspec.json.encode(body), is_long=is_long))

    async def _ask(self, session: aiohttp.ClientSession, body: bytes, *, is_long: bool) -> Reply:
        sent = {"data": body, "headers": {"Content-Type": "application/json"}}
        try:
            async with session.post(self._url, **sent) as answer:
                got = await answer.read()
        except (aiohttp.ClientError, TimeoutError):
            return Reply(is_whole=False, is_in_place=False)
        ends = b"[DONE]" if answer.content_type == "text/event-stream" else b"}"
        is_whole = answer.status == 200 and got.rstrip().endswith(ends) and b'"error"' not in got
        went = answer.headers.get(headers.PREFILL_CLUSTER), answer.headers.get(headers.OUTCOME)
        return Reply(is_whole, went == (EU if is_long else HUB, "ok"))

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        limits = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(
            connector=limits, timeout=aiohttp.ClientTimeout(total=PATIENCE_SECONDS)
        ) as session:
            asking = [asyncio.create_task(self._ask_on(session)) for _ in range(CLIENTS)]
            try:
                yield
            finally:
                for one in asking:
                    one.cancel()
                await asyncio.gather(*asking, return_exceptions=True)

    def taken(self) -> tuple[int, int, int]:
        """Return how many requests there were since the last look, were lost, and were prefilled elsewhere."""
        replies, self.replies = self.replies, []
        lost = sum(not one.is_whole for one in replies)
        return len(replies), lost, sum(one.is_whole and not one.is_in_place for one in replies)


async def under_load(secrets: Secrets, url: str) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """Return what six rotations cost, and what one in one step does."""
    load = Load(url)
    async with load.running():
        await asyncio.sleep(2.0)
        load.taken()  # until the gateway has seen all instances
        for number in range(ROTATIONS):
            say(f"rotation {number + 1} of {ROTATIONS}")
            await asyncio.gather(secrets.rotate(), asyncio.sleep(EVERY_SECONDS))
        found = load.taken()
        await secrets.replace_at_once()
        await asyncio.sleep(LATE_SECONDS)
        return found, load.taken()


def rotated() -> Iterator[Figure]:
    with tempfile.TemporaryDirectory() as made, launched(folder := Path(made)) as launch:
        (folder / "profile.json").write_bytes(msgspec.json.encode(as_measured(PROFILE, STEP_SECONDS, BATCH)))
        secrets = Secrets(folder)

        def start(name: str, who: Identity, role: str):
            place = ("--role", role, "--cluster", who.cluster, "--tls-dir", str(secrets.mounts[who].path))
            return launch(name, "--emulate", str(folder / "profile.json"), *FLAGS, *place)

        decode, prefill = start("d0", DECODES, "decode"), start("x0", PREFILLS, "prefill")
        for worker in (decode, prefill):
            asyncio.run(worker.ready())
        instances = (make_instance("d0", url=decode.url), make_instance("x0", url=prefill.url))
        clusters = (Cluster(name=EU, capacity_mbps=1000, utilisation_query="vector(0)"),)
        table = make_table(*instances, clusters=clusters, model="tiny", mode="Fixed", tokens=THRESHOLD)
        flags = ("--tls-dir", str(secrets.mounts[RELAYS].path))
        with serving(folder, "gateway", table, *flags) as ours:
            url = f"http://127.0.0.1:{ours.port}/v1/chat/completions"
            (served, lost, elsewhere), at_once = asyncio.run(under_load(secrets, url))
        yield Figure(name="rotation: requests while six of them happen", value=served, unit="", better="higher")
        counts = (("requests lost", lost, at_once[1]), ("prompts prefilled elsewhere", elsewhere, at_once[2]))
        for what, value, rival_value in counts:
            yield Figure(
                name=f"rotation: {what}", value=value, unit="", reach=0, rival=IN_ONE_STEP, rival_value=rival_value
            )
