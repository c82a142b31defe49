"""Proves that pools of vLLM and SGLang start with flags, fields and variables that these engines know, and that the
gateway learns by which protocol to ask them.

engine_arguments.json holds those names, taken from the sources of the engines' own packages.
"""

import json
from pathlib import Path

import pytest

from prfaas_operator.plan import policy as plan
from prfaas_operator.plan.pool_status import Counts
from prfaas_operator.render import pool_deployment, protection

KNOWN = json.loads((Path(__file__).parent / "engine_arguments.json").read_text())
MODEL = {"name": "kimi", "source": "/models/kimi"}
NIXL = {"type": "vllm", "image": "vllm/vllm-openai:v0"}
MOONCAKE = NIXL | {"connector": "Mooncake"}
SGLANG = {"type": "sglang", "image": "lmsysorg/sglang:v0"}
ALL = {"vllm-nixl": NIXL, "vllm-mooncake": MOONCAKE, "sglang": SGLANG}


def pod_of(wanted, member=None) -> dict:
    return pool_deployment.deployment(wanted, member)["spec"]["template"]["spec"]


def container_of(wanted) -> dict:
    return pod_of(wanted)["containers"][0]


def flags_of(container: dict) -> dict[str, str]:
    words = [word for word in container["args"] if word != "--enable-metrics"]
    return dict(zip(words[::2], words[1::2], strict=True))


def variables_of(container: dict) -> dict[str, str]:
    return {one["name"]: one["value"] for one in container["env"] if "value" in one}


def pools(make, engine: dict):
    return make.prefill_pool(engine=engine, model=MODEL), make.decode_pool(engine=engine, model=MODEL)


@pytest.mark.parametrize("engine", ALL.values(), ids=ALL)
def test_every_name_is_one_that_the_engine_knows(make, engine):
    known = KNOWN[engine["type"]]
    for wanted in pools(make, engine):
        container = container_of(wanted)
        assert {word for word in container["args"] if word.startswith("--")} <= set(known["flags"])
        flags = flags_of(container)
        assert set(json.loads(flags["--kv-events-config"])) <= set(known["kv_events"])
        if transfer := flags.get("--kv-transfer-config"):
            assert set(json.loads(transfer)) <= set(known["kv_transfer"])
        assert set(variables_of(container)) - {"HOME"} <= set(known.get("variables", []))


def test_instances_of_vllm_that_two_pools_share_wait_for_their_role_and_start_as_both(make):
    unshared = pool_deployment.deployment(make.decode_pool(engine=NIXL, model=MODEL), None)
    shared = pool_deployment.shared_deployment(unshared)["spec"]["template"]
    assert "prfaas.io/role" not in shared["metadata"]["labels"]
    assert [gate["conditionType"] for gate in shared["spec"]["readinessGates"]] == ["prfaas.io/role-assigned"]
    assert shared["spec"]["containers"] == unshared["spec"]["template"]["spec"]["containers"]


@pytest.mark.parametrize("engine", ALL.values(), ids=ALL)
def test_it_serves_the_model_at_the_port_that_the_gateway_asks_and_tells_of_its_cache(make, engine):
    for wanted in pools(make, engine):
        container = container_of(wanted)
        flags = flags_of(container)
        assert (flags["--port"], flags["--host"], flags["--served-model-name"]) == ("8000", "$(POD_IP)", "kimi")
        assert "/models/kimi" in (container["command"] + container["args"])
        ports = {one["name"]: one["containerPort"] for one in container["ports"]}
        events = json.loads(flags["--kv-events-config"])
        assert events["endpoint"] == f"tcp://*:{ports['kv-events']}"
        assert events["replay_endpoint"] == f"tcp://*:{ports['kv-replay']}"
        assert events["topic"] == "kv@$(POD_NAME)@kimi"
        assert all(len(name) <= 15 for name in ports)
        assert container["readinessProbe"]["httpGet"] == {"path": "/health", "port": "api"}
        assert "startupProbe" in container


def test_nixl_instances_serve_both_sides_and_shake_hands_at_their_own_address(make):
    for wanted in pools(make, NIXL):
        container = container_of(wanted)
        assert container["command"] == ["vllm", "serve", "/models/kimi"]
        transfer = json.loads(flags_of(container)["--kv-transfer-config"])
        assert transfer == {"kv_connector": "NixlConnector", "kv_role": "kv_both"}
        variables = variables_of(container)
        assert (variables["VLLM_NIXL_SIDE_CHANNEL_HOST"], variables["VLLM_NIXL_SIDE_CHANNEL_PORT"]) == (
            "$(POD_IP)",
            "5600",
        )
        names = [one["name"] for one in container["env"]]
        assert names.index("POD_IP") < names.index("VLLM_NIXL_SIDE_CHANNEL_HOST")


def test_mooncake_and_sglang_instances_know_their_side(make):
    transfers = [flags_of(container_of(one))["--kv-transfer-config"] for one in pools(make, MOONCAKE)]
    assert [json.loads(one)["kv_role"] for one in transfers] == ["kv_producer", "kv_consumer"]
    prefill, decode = (container_of(one) for one in pools(make, SGLANG))
    assert flags_of(prefill)["--disaggregation-mode"] == "prefill"
    assert flags_of(decode)["--disaggregation-mode"] == "decode"
    assert "--enable-metrics" in prefill["args"]


@pytest.mark.parametrize("engine", ALL.values(), ids=ALL)
def test_a_pools_own_arguments_come_last_and_its_pod_is_as_hardened_as_ours(make, engine):
    wanted = make.decode_pool(engine=engine | {"args": ["--max-model-len", "4096"]}, model=MODEL)
    pod, container = pod_of(wanted), container_of(wanted)
    ours = pod_of(make.decode_pool())
    assert container["args"][-2:] == ["--max-model-len", "4096"]
    assert pod["securityContext"] == ours["securityContext"]
    assert container["securityContext"] == ours["containers"][0]["securityContext"]
    mounts = {one["mountPath"] for one in container["volumeMounts"]}
    assert {"/dev/shm", variables_of(container)["HOME"]} <= mounts
    assert {one["name"] for one in container["volumeMounts"]} == {one["name"] for one in pod["volumes"]}


@pytest.mark.parametrize(("name", "engine"), [*ALL.items(), ("prfaas", {})])
def test_the_routing_table_says_by_which_protocol(make, name, engine):
    prefill, decode = pools(make, engine)
    facts = plan.PolicyFacts(
        make.policy(model="kimi", prefillPools=["offload"]),
        {"decode": decode},
        {"offload": prefill},
        {"eu": make.member()},
    )
    views = {
        "eu": plan.ObservedCluster((make.pod("x", "offload"),), True),
        "hub": plan.ObservedCluster((make.pod("d", "decode"),), True),
    }
    table = plan.routing_table(facts, views, None)
    assert {one.engine for one in table.instances} == {name}
    assert plan.readiness(facts, table, Counts(ready=1)).good


def test_the_routing_table_has_the_policys_slo(make):
    for slo, millis in (({"slo": {"ttftMillis": 2500}}, 2500), ({}, None)):
        facts = plan.PolicyFacts(make.policy(model="kimi", **slo), {"decode": make.decode_pool(model=MODEL)}, {}, {})
        assert plan.routing_table(facts, {}, None).ttft_slo_millis == millis


def test_two_kinds_of_engine_in_one_policy_are_told(make):
    facts = plan.PolicyFacts(
        make.policy(model="kimi", prefillPools=["offload"]),
        {"decode": make.decode_pool(engine=NIXL, model=MODEL)},
        {"offload": make.prefill_pool(engine=SGLANG, model=MODEL)},
        {"eu": make.member()},
    )
    verdict = plan.readiness(facts, plan.routing_table(facts, {}, None), Counts(ready=1))
    assert (verdict.reason, "sglang" in verdict.message) == ("EngineMismatch", True)


def test_a_gateway_reaches_the_ports_of_others_engines_only_where_there_are_some(make):
    def ports(engines) -> set[int]:
        policy = protection.network_policy(make.policy(), engines)
        return {one["port"] for rule in policy["spec"]["egress"] for one in rule["ports"]}

    assert ports({"sglang"}) - ports({"prfaas"}) == ports({"vllm-mooncake"}) - ports(set()) == {8998, 5557, 5558}
