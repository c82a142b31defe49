"""Proves that an instance converts under load, by hand and by the policy: no request is lost, no model is loaded.

The pools of this file are its own, beside those of the installation, and go in the end.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import NamedTuple

import httpx
import pytest

from prfaas.wire import headers
from prfaas_sandbox.demo.install import MODEL, NAMESPACE, POLICY, ExampleInstallation

from .checks import apply, condition, eventually, fresh_text, get, only_in_the_sandbox, only_on_kind

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="session")]

NAME = "swing"


class Answer(NamedTuple):
    """One request: when it was sent, what came, and which instances served it."""

    sent_seconds: float
    status: int
    prefill: str
    decode: str


@asynccontextmanager
async def asking(url: str, tokens: int = 300, answer_tokens: int = 8) -> AsyncIterator[list[Answer]]:
    """Keep three requests under way as long as the block runs; give the list that collects the answers."""
    answers: list[Answer] = []
    stopped = asyncio.Event()

    async def ask(http: httpx.AsyncClient) -> None:
        while not stopped.is_set():
            body = {"model": MODEL, "prompt": fresh_text(tokens), "max_tokens": answer_tokens}
            sent_seconds = time.monotonic()
            got = await http.post("/v1/completions", json=body)
            served = (got.headers.get(headers.PREFILL_INSTANCE, ""), got.headers.get(headers.DECODE_INSTANCE, ""))
            answers.append(Answer(sent_seconds, got.status_code, *served))

    async with httpx.AsyncClient(base_url=url, timeout=120) as http:
        tasks = [asyncio.create_task(ask(http)) for _ in range(3)]
        try:
            yield answers
        finally:
            stopped.set()
            await asyncio.gather(*tasks)


async def instances(installation: ExampleInstallation) -> dict[str, tuple[str, str, int]]:
    """Return role, container and restarts of the shared Deployment's pods by name."""
    environment = installation.environment
    words = ("-n", NAMESPACE, "get", "pods", "-l", f"prfaas.io/pool={NAME}-decode", "-o", "json")
    found = {}
    for pod in json.loads(await environment.kubectl(environment.hub, *words))["items"]:
        (worker,) = pod["status"]["containerStatuses"]
        role = pod["metadata"]["labels"]["prfaas.io/role"]
        found[pod["metadata"]["name"]] = (role, worker["containerID"], worker["restartCount"])
    return found


async def scale(installation: ExampleInstallation, prefill: int, decode: int) -> None:
    """Scale both pools; the sum stays."""
    environment = installation.environment
    for pool, replicas in ((f"pfpool/{NAME}", prefill), (f"dcpool/{NAME}-decode", decode)):
        await environment.kubectl(environment.hub, "-n", NAMESPACE, "scale", pool, f"--replicas={replicas}")


@asynccontextmanager
async def swinging(installation: ExampleInstallation, replicas: dict[str, int], **policy: object) -> AsyncIterator[str]:
    """Have pools that share their instances, and a policy over them; give its gateway's URL."""
    environment, standing = installation.environment, (await get(installation, "prfaas", POLICY))["spec"]
    decode = {**(await get(installation, "dcpool", "decode"))["spec"], "replicas": sum(replicas.values())}
    specs = {
        # First, so that the Deployment is made in its shared form: sharing one that runs would replace its pods once.
        ("PrefillPool", NAME): {"shareWith": f"{NAME}-decode", "replicas": 0},
        ("DecodePool", f"{NAME}-decode"): decode,
        ("PrfaaSPolicy", NAME): {
            "model": MODEL,
            "decodePool": f"{NAME}-decode",
            "prefillPools": [NAME],
            "threshold": {"mode": "Disabled"},
            "gateway": standing["gateway"],
            "metrics": standing["metrics"],
            **policy,
        },
    }
    for (kind, name), spec in specs.items():
        metadata = {"name": name, "namespace": NAMESPACE}
        await apply(
            installation, {"apiVersion": "prfaas.io/v1alpha1", "kind": kind, "metadata": metadata, "spec": spec}
        )
    try:
        await installation.wait_ready("dcpool", f"{NAME}-decode", timeout_seconds=180)
        await environment.kubectl(
            environment.hub, "-n", NAMESPACE, "rollout", "status", f"deployment/{NAME}-gateway", "--timeout=120s"
        )
        await scale(installation, **replicas)
        url = await environment.forward(environment.hub, NAMESPACE, f"{NAME}-gateway", 80)
        await eventually(lambda: serves(url), "the gateway knows its instances")
        yield url
    finally:
        for kind, name in reversed(specs):
            await environment.kubectl(environment.hub, "-n", NAMESPACE, "delete", kind, name, "--timeout=120s")


async def serves(url: str) -> bool:
    """Tell whether a request is answered."""
    async with httpx.AsyncClient(base_url=url, timeout=120) as http:
        body = {"model": MODEL, "prompt": fresh_text(100), "max_tokens": 1}
        return (await http.post("/v1/completions", json=body)).status_code == 200


@only_on_kind
async def test_an_instance_converts_under_load_without_loss_and_without_loading_a_model(
    installation: ExampleInstallation,
):
    async with swinging(installation, {"prefill": 0, "decode": 2}) as url:
        before = await instances(installation)
        assert sorted(role for role, _, _ in before.values()) == ["decode", "decode"]
        async with asking(url) as answers:
            await there_are(answers, 10)
            await scale(installation, prefill=1, decode=1)
            began_seconds = time.monotonic()
            converted = await first_leg(installation, answers, before)
            leg = next(one for one in answers if one.prefill == converted != one.decode)
            await there_are(answers, len(answers) + 10)
            await scale(installation, prefill=0, decode=2)
            await eventually(lambda: decodes(answers, converted), "the instance decodes again")
        after = await instances(installation)
    print(f"first leg in the new role after {leg.sent_seconds - began_seconds:.2f} s; {len(answers)} requests")
    assert {one.status for one in answers} == {200}, "no request failed"
    assert after == before, "the same containers, none restarted, in the roles that they had"


@only_in_the_sandbox
async def test_a_policy_converts_an_instance_when_prompts_are_long_and_answers_short(installation: ExampleInstallation):
    async with swinging(
        installation,
        {"prefill": 1, "decode": 2},
        conversion={"enabled": True, "minPrefill": 1, "minDecode": 1, "cooldownSeconds": 10},
        intervals={"longSeconds": 10},
    ) as url:
        environment = installation.environment
        for pool in (f"pfpool/{NAME}", f"dcpool/{NAME}-decode"):
            await environment.kubectl(
                environment.hub, "-n", NAMESPACE, "annotate", pool, "prfaas.io/scaled-by-policy=true"
            )
        before = await instances(installation)
        async with asking(url, tokens=2000, answer_tokens=2) as answers:
            await eventually(lambda: prefills(installation, 2), "the policy converts an instance", 240)
            balanced = await condition(installation, "prfaas", NAME, "Balanced")
            await there_are(answers, len(answers) + 10)
        after = await instances(installation)
        plan = (await get(installation, "prfaas", NAME))["status"]["plan"]
    print(f"converted after {len(answers)} requests: {balanced['message']}")
    assert {one.status for one in answers} == {200}, "no request failed"
    assert (plan["prefill"], plan["decode"]) == (2, 1)
    assert {name: facts[1:] for name, facts in after.items()} == {name: facts[1:] for name, facts in before.items()}


async def prefills(installation: ExampleInstallation, count: int) -> bool:
    """Tell whether so many of the shared instances prefill."""
    return [role for role, _, _ in (await instances(installation)).values()].count("prefill") == count


async def there_are(answers: list[Answer], count: int) -> None:
    async def reached() -> bool:
        return len(answers) >= count

    await eventually(reached, f"{count} answers")


async def first_leg(
    installation: ExampleInstallation, answers: list[Answer], before: dict[str, tuple[str, str, int]]
) -> str:
    """Return the instance that prefills for another one, once a request was served so."""

    async def served() -> bool:
        return any(one.prefill != one.decode for one in answers)

    await eventually(served, "a request is prefilled by the converted instance")
    now = await instances(installation)
    (converted,) = (name for name, (role, _, _) in now.items() if role == "prefill")
    assert {name: facts[1:] for name, facts in now.items()} == {name: facts[1:] for name, facts in before.items()}
    return converted


async def decodes(answers: list[Answer], name: str) -> bool:
    return answers[-1].decode == name
