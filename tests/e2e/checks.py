"""What the whole-system tests ask of an installation."""

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
from tests.waiting import PATIENCE_SECONDS, eventually_async

from prfaas_sandbox.demo.client import DemoClient, text_of
from prfaas_sandbox.demo.install import MODEL, NAMESPACE, ExampleInstallation
from prfaas_sandbox.demo.records import RequestRecord

_numbers = itertools.count()

# More than the waits of a test together. The fixtures have their own limits: images take long to build.
TIMEOUT = pytest.mark.timeout(900, func_only=True)
only_in_the_sandbox = pytest.mark.parametrize(
    "installation", [pytest.param("sandbox", marks=TIMEOUT)], indirect=True, scope="session"
)
"""For what needs none of kind's: kubelets, images, security contexts, network policies, rollouts."""
only_on_kind = pytest.mark.parametrize(
    "installation", [pytest.param("kind", marks=[TIMEOUT, pytest.mark.kind])], indirect=True, scope="session"
)
"""For what containers and kubelets decide: what a process may, when pods read Secrets, take requests, and end."""


def fresh_text(tokens: int) -> str:
    """Return a text that begins as no other one does, so that no cache holds any of it."""
    beginning = f"{next(_numbers)} of those that were asked once. "
    return beginning + text_of(tokens - len(beginning))


async def eventually(
    check: Callable[[], Awaitable[bool]], what: str, timeout_seconds: float = PATIENCE_SECONDS
) -> None:
    """Wait until `check` holds; fail with `what` when it never does."""
    await eventually_async(check, what, timeout_seconds, poll=0.6)


async def ask_until_offloaded(client: DemoClient, tokens: int, act: str) -> tuple[str, RequestRecord]:
    """Return a prompt of `tokens` that the offload cluster has prefilled, and its record.

    Others are answered at home first while the threshold, which follows the load of earlier tests, comes down.
    """

    async def ask() -> tuple[str, RequestRecord] | None:
        prompt = fresh_text(tokens)
        record = await client.ask(prompt, act=act)
        assert record.output_tokens == 24, f"each prompt is answered whole: {record}"
        return (prompt, record) if record.prefilled_in == "prefill-eu" else None

    asked = await eventually_async(ask, f"a prompt of {tokens} tokens is offloaded ({act})", 180, poll=0.6)
    assert asked is not None
    return asked


async def apply(installation: ExampleInstallation, body: dict) -> None:
    """Apply one object in the hub."""
    await installation.environment.kubectl(installation.environment.hub, "apply", "-f", "-", stdin=json.dumps(body))


async def get(installation: ExampleInstallation, kind: str, name: str) -> dict:
    """Return one object of the hub."""
    environment = installation.environment
    return json.loads(await environment.kubectl(environment.hub, "-n", NAMESPACE, "get", kind, name, "-o", "json"))


async def condition(installation: ExampleInstallation, kind: str, name: str, type_: str = "Ready") -> dict:
    """Return a condition of an object of the hub, or an empty one."""
    conditions = (await get(installation, kind, name)).get("status", {}).get("conditions", [])
    return next((c for c in conditions if c["type"] == type_), {"status": "", "reason": "", "message": ""})


@asynccontextmanager
async def asking(installation: ExampleInstallation, tokens: int = 200) -> AsyncIterator[list[RequestRecord]]:
    """Send one short prompt after the other as long as the block runs; give the list that collects the answers.

    Begins once one was answered: an installation may have been made just before.
    """
    records: list[RequestRecord] = []
    stopped = asyncio.Event()
    client = DemoClient(installation.gateway_url, MODEL)

    async def serves() -> bool:
        return not (await client.ask(fresh_text(tokens), act="before", max_tokens=8)).outcome.startswith("failed")

    await eventually(serves, "a request is answered")

    async def ask() -> None:
        while not stopped.is_set():
            text = text_of(tokens, start=400_000 + 31 * len(records))
            records.append(await client.ask(text, act="meanwhile", max_tokens=8))

    task = asyncio.create_task(ask())
    try:
        yield records
    finally:
        stopped.set()
        await task
        await client.close()
