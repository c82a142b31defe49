"""Proves that every container that the operator renders has requests and limits, and that owners may set them."""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.containers import ASKED, containers_in, lacking

from prfaas.api import DecodePool
from prfaas.api.crd import structural
from prfaas.api.decodepool import DecodePoolSpec
from prfaas.api.prfaaspolicy import GatewaySpec
from prfaas.api.template import PodTemplate, Resources
from prfaas.engines import ENGINES
from prfaas_operator.preflight import jobs
from prfaas_operator.render import certificates, gateway, pool_deployment, vllm
from prfaas_operator.render.launch import StartTerms

IMAGE = gateway.GatewayImage("reg/g:1")

ROOT = Path(__file__).parents[3]
MODEL = {"name": "kimi", "source": "/models/kimi"}
GPU = {"resources": {"limits": {"nvidia.com/gpu": 1}}}
STOCK_VLLM = {"type": "vllm", "image": "vllm/vllm-openai:v0"}
KEYS = {"apiKeysSecretRef": {"name": "chat-api-keys"}}


def engines() -> dict[str, dict[str, Any]]:
    """Return every engine that the API server accepts, by name; vLLM with each of its connectors."""
    fields = structural(DecodePoolSpec)["properties"]["engine"]["properties"]
    connectors = fields["transfer"]["properties"]["connector"]["enum"]
    found = {name: {"type": name, "image": "image:1"} for name in fields["type"]["enum"]}
    base = found.pop("vllm")
    return found | {f"vllm-{name}": base | {"transfer": {"connector": name}} for name in connectors}


def deployments(make, engine: dict[str, Any], template: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the Deployments of all pools of an engine: both roles, both clusters, shared, with and without TLS."""
    spec = {"engine": engine, "model": MODEL, "template": template}
    pools = [(make.decode_pool(**spec), None)]
    if engine["type"] != "dynamo":  # which has no PrefillPool
        pools += [(make.prefill_pool(**spec), member) for member in (None, make.member(addressing="HostIP"))]
    for pool, member in pools:
        for tls in (False, True):
            yield (one := pool_deployment.deployment(pool, member, StartTerms(tls=tls)))
            if isinstance(pool, DecodePool):
                yield pool_deployment.shared_deployment(one)


@pytest.mark.parametrize("template", [{}, GPU], ids=["unset", "gpu"])
@pytest.mark.parametrize("engine", engines().values(), ids=engines())
def test_every_container_of_a_pool_has_requests_and_limits(make, engine, template):
    found = [lacking(one) for one in deployments(make, engine, template)]
    assert found == [[]] * len(found)


@pytest.mark.parametrize("spec", [{}, KEYS], ids=["open", "keys"])
def test_every_container_of_a_gateway_pod_has_requests_and_limits(make, spec):
    plain = gateway.deployment(make.policy(gateway=spec), IMAGE)
    assert [one["name"] for one in containers_in(plain)] == ["gateway", "scheduler"]
    assert lacking(plain) == lacking(certificates.gateway_in_tls(plain)) == []


def test_the_probe_has_requests_and_limits():
    pod = jobs.trial(jobs.Order("token", "image:1", "server:443", None, 60.0))
    assert [one["name"] for one in containers_in(pod)] == ["probe"]
    assert lacking(pod) == []


def test_nothing_else_of_the_operator_renders_pods():
    files = (ROOT / "operator").rglob("*.py")
    found = {path.name for path in files if '"containers":' in path.read_text()}
    assert found == {"gateway.py", "jobs.py", "pool_deployment.py"}, "the tests above must render the pods of each"


def test_finds_every_container_that_lacks_one_of_them(make):
    complete = pool_deployment.deployment(make.decode_pool(engine=STOCK_VLLM, model=MODEL), None)
    for number, container in enumerate(containers_in(complete)):
        for part, name in ASKED:
            changed = copy.deepcopy(complete)
            del containers_in(changed)[number]["resources"][part][name]
            assert lacking(changed) == [f"{container['name']}: {part}.{name}"]
    assert [one["name"] for one in containers_in(complete)] == ["connector", "version", "worker"]


def test_an_instances_memory_grows_with_its_gpus(make):
    def limit(**spec: Any) -> str:
        wanted = make.decode_pool(engine=STOCK_VLLM, model=MODEL, **spec)
        return containers_in(pool_deployment.deployment(wanted, None))[-1]["resources"]["limits"]["memory"]

    four = {"parallelism": {"tensor": 4}, "template": {"resources": {"limits": {"nvidia.com/gpu": 4}}}}
    assert (limit(), limit(template=GPU), limit(**four)) == ("128Gi", "128Gi", "512Gi")


@pytest.mark.parametrize(
    ("wanted", "rendered"),
    [
        ({"limits": {"memory": "64Mi"}}, {"requests": {"cpu": "50m"}, "limits": {"memory": "64Mi", "cpu": "1"}}),
        (
            {"requests": {"memory": "1.5e8"}},
            {"requests": {"memory": "1.5e8", "cpu": "50m"}, "limits": {"cpu": "1", "memory": "256Mi"}},
        ),
        (
            {"requests": {"memory": "269M", "cpu": "1001m"}},
            {"requests": {"memory": "269M", "cpu": "1001m"}, "limits": {"cpu": "1001m", "memory": "269M"}},
        ),
        (
            {"requests": {"cpu": 2}, "limits": {"memory": "2Gi"}},
            {"requests": {"cpu": 2}, "limits": {"memory": "2Gi", "cpu": 2}},
        ),
    ],
    ids=["limit", "request", "large-request", "both"],
)
def test_a_default_never_contradicts_what_an_owner_names(make, wanted, rendered):
    """A default request above the owner's limit would be refused, and a limit below the owner's request, too."""
    pool = make.decode_pool(engine=STOCK_VLLM, model=MODEL, template={"connectorResources": wanted})
    assert containers_in(pool_deployment.deployment(pool, None))[0]["resources"] == rendered


def test_the_fields_say_their_defaults(make):
    template, policy = structural(PodTemplate)["properties"], structural(GatewaySpec)["properties"]
    for field, default in (
        (policy["resources"], gateway.GATEWAY_DEFAULTS),
        (policy["schedulerResources"], gateway.SCHEDULER_DEFAULTS),
        (template["resources"], pool_deployment.default_resources(make.decode_pool())),
        (template["connectorResources"], vllm.CONNECTOR_DEFAULTS),
    ):
        assert text_of(default) in field["description"]
    assert f"{ENGINES['vllm-prfaas'].memory_gib}Gi for each GPU" in template["resources"]["description"]


def text_of(default: Resources) -> str:
    """Return defaults as the texts say them: `100m of cpu; 256Mi of memory, at most 2Gi`."""
    return "; ".join(
        f"{quantity} of {name}" + (f", at most {default.limits[name]}" if name in default.limits else "")
        for name, quantity in default.requests.items()
    )
