"""Proves that pools of other engines start with flags, fields and variables that these engines know, and that the
gateway learns by which protocol to ask them.

engine_arguments.json holds those names, taken from the sources of the engines' own packages.
"""

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest
from tests.waiting import eventually

from prfaas.wire.routes import Instance
from prfaas_operator.plan import policy as plan
from prfaas_operator.plan.pod_facts import VERSION_CONTAINER
from prfaas_operator.plan.pool_status import Counts
from prfaas_operator.render import pool_deployment, protection
from prfaas_operator.render.launch import DEFAULT_TERMS, StartTerms
from prfaas_vllm.settings import read_settings

KNOWN = json.loads((Path(__file__).parent / "engine_arguments.json").read_text())
MODEL = {"name": "kimi", "source": "/models/kimi"}
OURS = {"type": "vllm", "image": "vllm/vllm-openai:v0"}
NIXL = OURS | {"transfer": {"connector": "Nixl"}}
MOONCAKE = OURS | {"transfer": {"connector": "Mooncake"}}
SGLANG = {"type": "sglang", "image": "lmsysorg/sglang:v0"}
TENSORRT = {"type": "tensorrt-llm", "image": "nvcr.io/nvidia/tensorrt-llm/release:1"}
DYNAMO = {"type": "dynamo", "image": "nvcr.io/nvidia/ai-dynamo/dynamo-frontend:1"}
OVER_ZMQ = {"vllm-nixl": NIXL, "vllm-mooncake": MOONCAKE, "sglang": SGLANG}
ALL = {"vllm-prfaas": OURS} | OVER_ZMQ | {"tensorrt-llm": TENSORRT, "dynamo": DYNAMO}
OF_LIBRARIES = {"HOME", "USER", "PYTHONPATH", "UCX_TLS", "PRFAAS_ENGINE_CONFIG"}
"""Variables that no engine defines: those of libraries, and one that our own command reads."""
SWITCHES = ("--enable-metrics", "--disaggregation-enable-kv-checksum", "--enable-ssl-refresh")


def pod_of(wanted, member=None, terms=DEFAULT_TERMS) -> dict:
    return pool_deployment.deployment(wanted, member, terms)["spec"]["template"]["spec"]


def container_of(wanted, terms=DEFAULT_TERMS) -> dict:
    return pod_of(wanted, terms=terms)["containers"][0]


def flags_of(container: dict) -> dict[str, str]:
    words = [word for word in container["args"] if word not in SWITCHES]
    words = words[2:] if words[0] == "serve" else words  # trtllm-serve's command and model
    return dict(zip(words[::2], words[1::2], strict=True))


def transfer_of(container: dict) -> dict:
    return json.loads(flags_of(container)["--kv-transfer-config"])


def variables_of(container: dict) -> dict[str, str]:
    return {one["name"]: one["value"] for one in container["env"] if "value" in one}


def ports_of(container: dict) -> dict[str, int]:
    return {one["name"]: one["containerPort"] for one in container["ports"]}


def pools(make, engine: dict, **spec):
    decode = make.decode_pool(engine=engine, model=MODEL, **spec)
    return (decode,) if engine is DYNAMO else (make.prefill_pool(engine=engine, model=MODEL, **spec), decode)


@pytest.mark.parametrize("engine", ALL.values(), ids=ALL)
def test_every_name_is_one_that_the_engine_knows(make, engine):
    known = KNOWN[engine["type"]]
    parallelism = {} if engine is DYNAMO else {"parallelism": {"tensor": 2, "pipeline": 2}}
    for wanted in pools(make, engine, **parallelism):
        container = container_of(wanted, StartTerms(tls=True))
        words = {word for word in container["args"] if word.startswith("--")}
        assert words <= set(known["flags"])
        flags = flags_of(container)
        if "kv_events" in known:
            assert set(json.loads(flags["--kv-events-config"])) <= set(known["kv_events"])
        if "--kv-transfer-config" in flags:
            assert set(transfer_of(container)) <= set(known["kv_transfer"])
        assert set(variables_of(container)) - OF_LIBRARIES <= set(known.get("variables", []))
        assert ("UCX_TLS" in variables_of(container)) == (engine in (NIXL, SGLANG, TENSORRT))


@pytest.mark.parametrize("engine", [OURS, NIXL], ids=["ours", "nixl"])
def test_instances_of_vllm_that_two_pools_share_wait_for_their_role_and_start_as_both(make, engine):
    unshared = pool_deployment.deployment(make.decode_pool(engine=engine, model=MODEL), None)
    shared = pool_deployment.shared_deployment(unshared)["spec"]["template"]
    assert "prfaas.io/role" not in shared["metadata"]["labels"]
    assert [gate["conditionType"] for gate in shared["spec"]["readinessGates"]] == ["prfaas.io/role-assigned"]
    assert shared["spec"]["containers"] == unshared["spec"]["template"]["spec"]["containers"]


@pytest.mark.parametrize("engine", ALL.values(), ids=ALL)
def test_it_serves_at_the_port_that_the_gateway_asks(make, engine):
    for wanted in pools(make, engine):
        container = container_of(wanted)
        flags, ports = flags_of(container), ports_of(container)
        http = "--http-" if engine is DYNAMO else "--"
        assert (flags[f"{http}port"], flags[f"{http}host"], ports["api"]) == ("8000", "$(POD_IP)", 8000)
        assert all(len(name) <= 15 for name in ports)
        assert container["readinessProbe"]["httpGet"] == {"path": "/health", "port": "api"}
        assert "startupProbe" in container


@pytest.mark.parametrize("engine", OVER_ZMQ.values(), ids=OVER_ZMQ)
@pytest.mark.parametrize("ranks", [1, 4])
def test_an_engine_names_its_model_and_publishes_its_cache(make, engine, ranks):
    for wanted in pools(make, engine, parallelism={"data": ranks}):
        container = container_of(wanted)
        flags, ports = flags_of(container), ports_of(container)
        assert flags["--served-model-name"] == "kimi"
        assert "/models/kimi" in (container["command"] + container["args"])
        events = json.loads(flags["--kv-events-config"])
        assert events["endpoint"] == f"tcp://*:{ports['kv-events']}"
        assert events["replay_endpoint"] == f"tcp://*:{ports['kv-replay']}"
        assert events["topic"] == "kv@$(POD_NAME)@kimi"
        assert len(set(ports.values())) == len(ports), "engines add a rank's number to both ports: none may meet"
        assert set(range(5557, 5557 + 2 * ranks)) <= set(ports.values())


@pytest.mark.parametrize("ranks", [1, 4])
def test_vllm_with_our_connector_publishes_nothing_itself(make, ranks):
    for wanted in pools(make, OURS, parallelism={"data": ranks}):
        container = container_of(wanted)
        events = json.loads(flags_of(container)["--kv-events-config"])
        assert events == {"enable_kv_cache_events": True, "publisher": "null"}
        assert set(ports_of(container).values()) == {8000, *range(8001, 8002 + ranks)}


@pytest.mark.parametrize("engine", [OURS, NIXL, MOONCAKE])
def test_an_instance_of_vllm_that_leaves_finishes_its_requests_within_the_pools_drain(make, engine):
    """By default vLLM aborts them at SIGTERM."""
    pod = pod_of(make.decode_pool(engine=engine, model=MODEL, drainSeconds=90))
    assert flags_of(pod["containers"][0])["--shutdown-timeout"] == "90"
    assert pod["terminationGracePeriodSeconds"] == 5 + 90 + 10


def test_our_connector_comes_into_a_stock_image(make):
    pod = pod_of(make.decode_pool(engine=OURS, model=MODEL), terms=StartTerms("reg/connector:7"))
    (copy, _), (container,) = pod["initContainers"], pod["containers"]
    assert (copy["image"], container["image"]) == ("reg/connector:7", "vllm/vllm-openai:v0")
    assert copy["command"] == ["cp", "-r", "/prfaas-vllm/.", copy["volumeMounts"][0]["mountPath"]]
    assert copy["securityContext"] == container["securityContext"]
    (volume,) = [one for one in pod["volumes"] if one["name"] == copy["volumeMounts"][0]["name"]]
    assert volume == {"name": "prfaas-connector", "emptyDir": {}}
    mount = {"name": volume["name"], "mountPath": "/prfaas-vllm", "readOnly": True}
    assert mount in container["volumeMounts"]
    assert variables_of(container)["PYTHONPATH"] == "/prfaas-vllm"
    assert transfer_of(container) == {
        "kv_connector": "PrfaasConnector",
        "kv_connector_module_path": "prfaas_vllm.connector",
        "kv_role": "kv_both",
        "kv_port": 8001,
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"host": "$(POD_IP)", "cluster": "hub", "metrics_port": 8002, "movers": 1},
    }


def test_our_connector_looks_at_the_version_in_vllms_image_before_vllm_starts_there(make):
    connector_resources = {"limits": {"memory": "512Mi"}}
    wanted = make.decode_pool(engine=OURS, model=MODEL, template={"connectorResources": connector_resources})
    pod = pod_of(wanted, terms=StartTerms("reg/connector:7"))
    (copy, version), (container,) = pod["initContainers"], pod["containers"]
    assert (version["name"], version["image"]) == (VERSION_CONTAINER, container["image"])
    for same in ("resources", "securityContext"):
        assert version[same] == copy[same]
    assert version["resources"]["limits"] == {"cpu": "1", "memory": "512Mi"}
    (mount,) = version["volumeMounts"]
    assert mount in container["volumeMounts"]
    assert variables_of(version) == {"PYTHONPATH": mount["mountPath"]}


@pytest.mark.system
@pytest.mark.parametrize("runs", ["exit 0", "exit 1", "kill -9 $$"])
def test_an_image_in_which_the_version_cannot_be_looked_at_starts_all_the_same(make, tmp_path, runs):
    (tmp_path / "python3").write_text(f"#!/bin/sh\n{runs}\n")
    (tmp_path / "python3").chmod(0o755)
    _, version = pod_of(make.decode_pool(engine=OURS, model=MODEL))["initContainers"]
    for path in (str(tmp_path), ""):
        assert subprocess.run(version["command"], env={"PATH": path}, timeout=30, check=False).returncode == 0


def test_our_connector_knows_every_setting_that_it_gets(make):
    transfer = {"extraConfig": {"compression": "none", "transfer_memory_mib": "512", "egress_mbps": "10"}}
    wanted = make.prefill_pool(engine=OURS | {"transfer": transfer}, model=MODEL, parallelism={"tensor": 4})
    extra = transfer_of(container_of(wanted, StartTerms(tls=True)))["kv_connector_extra_config"]
    settings = read_settings(extra)
    assert (settings.cluster, settings.tls_dir, settings.metrics_port) == ("eu", "/etc/prfaas/tls", 8005)
    assert (settings.compression, settings.transfer_memory_mib, settings.egress_mbps) == ("none", 512, 10)


def test_our_connector_gets_the_certificate_the_cluster_and_the_egress_share_of_our_own_worker(make):
    wanted = make.prefill_pool(engine=OURS, model=MODEL, egressMbps=100)
    own = make.prefill_pool(egressMbps=100)
    terms = StartTerms(tls=True)
    manifest, ours = (pool_deployment.deployment(one, make.member(), terms) for one in (wanted, own))
    (container,), (worker,) = (one["spec"]["template"]["spec"]["containers"] for one in (manifest, ours))
    extra = transfer_of(container)["kv_connector_extra_config"]
    flags = flags_of(worker)
    assert (extra["tls_dir"], extra["cluster"]) == (flags["--tls-dir"], flags["--cluster"])
    assert extra["egress_file"] == flags["--egress-file"]
    for name in ("prfaas-tls", "prfaas-settings"):
        (mounts, owns) = ([one for one in each["volumeMounts"] if one["name"] == name] for each in (container, worker))
        assert mounts == owns
        (volumes, owns) = (
            [one for one in each["spec"]["template"]["spec"]["volumes"] if one["name"] == name]
            for each in (manifest, ours)
        )
        assert volumes == owns
    assert manifest["spec"]["template"]["metadata"]["annotations"]["prfaas.io/scheme"] == "https"
    words = container["args"]
    place = words[words.index("--ssl-keyfile") + 1]
    (mount,) = [one for one in container["volumeMounts"] if place.startswith(one["mountPath"])]
    (volume,) = [one for one in manifest["spec"]["template"]["spec"]["volumes"] if one["name"] == mount["name"]]
    assert volume["emptyDir"] == {"medium": "Memory"}, "a key is copied to no disk"
    assert {container[f"{probe}Probe"]["httpGet"]["scheme"] for probe in ("startup", "readiness", "liveness")} == {
        "HTTPS"
    }


@pytest.mark.system
def test_vllm_gets_copies_of_a_certificate_that_are_written_in_place(make, tmp_path):
    """The kubelet swaps a folder by a link; vLLM's watcher hears of the first swap only."""
    container = container_of(make.decode_pool(engine=OURS, model=MODEL), StartTerms(tls=True))
    assert (container["command"][3], container["args"][:2]) == ("vllm", ["serve", "/models/kimi"])
    secret, copies = tmp_path / "secret", tmp_path / "copies"
    script = container["command"][2].replace("/etc/prfaas/tls", str(secret)).replace("/dev/shm/prfaas-tls", str(copies))
    script = script.replace("sleep 10", "sleep 0.05").replace("exec vllm", "sleep 600 #")

    def swap(number: int) -> None:
        folder = tmp_path / f"version-{number}"
        folder.mkdir()
        for name in ("tls.crt", "tls.key", "ca.crt"):
            (folder / name).write_text(f"{name} {number}")
        (tmp_path / "new").symlink_to(folder)
        (tmp_path / "new").rename(secret)

    def is_copied(number: int) -> bool:
        return all((copies / name).read_text() == f"{name} {number}" for name in ("tls.crt", "tls.key", "ca.crt"))

    swap(0)
    with subprocess.Popen(["/bin/sh", "-c", script, "vllm"], start_new_session=True) as process:
        try:
            eventually(lambda: (copies / "ca.crt").exists() and is_copied(0), "the certificate is copied")
            before = {path.name: path.stat().st_ino for path in copies.iterdir()}
            assert {path.stat().st_mode & 0o077 for path in copies.iterdir()} == {0}
            for number in (1, 2):
                swap(number)
                eventually(lambda number=number: is_copied(number), "the new certificate is copied")
            assert {path.name: path.stat().st_ino for path in copies.iterdir()} == before
        finally:
            os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.parametrize("engine", [NIXL, MOONCAKE, SGLANG, TENSORRT, DYNAMO])
def test_an_engine_without_our_certificate_stays_plain(make, engine):
    manifest = pool_deployment.deployment(make.decode_pool(engine=engine, model=MODEL), None, StartTerms(tls=True))
    template = manifest["spec"]["template"]
    assert "prfaas.io/scheme" not in template["metadata"]["annotations"]
    assert "prfaas-tls" not in {one["name"] for one in template["spec"]["volumes"]}
    assert "initContainers" not in template["spec"]


def test_nixl_instances_serve_both_sides_and_shake_hands_at_their_own_address(make):
    for wanted in pools(make, NIXL):
        container = container_of(wanted)
        assert container["command"] == ["vllm", "serve", "/models/kimi"]
        assert transfer_of(container) == {
            "kv_connector": "NixlConnector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
        }
        variables = variables_of(container)
        assert (variables["VLLM_NIXL_SIDE_CHANNEL_HOST"], variables["VLLM_NIXL_SIDE_CHANNEL_PORT"]) == (
            "$(POD_IP)",
            "5600",
        )
        names = [one["name"] for one in container["env"]]
        assert names.index("POD_IP") < names.index("VLLM_NIXL_SIDE_CHANNEL_HOST")


def test_mooncake_and_sglang_instances_know_their_side(make):
    transfers = [transfer_of(container_of(one)) for one in pools(make, MOONCAKE)]
    assert [one["kv_role"] for one in transfers] == ["kv_producer", "kv_consumer"]
    prefill, decode = (container_of(one) for one in pools(make, SGLANG))
    assert flags_of(prefill)["--disaggregation-mode"] == "prefill"
    assert flags_of(decode)["--disaggregation-mode"] == "decode"
    assert {"--enable-metrics", "--disaggregation-enable-kv-checksum"} <= set(prefill["args"])


def test_caches_cross_by_tcp_unless_a_pool_sets_rdma(make):
    def rendered(engine: dict, **transfer) -> dict:
        both = engine.get("transfer", {}) | transfer
        return container_of(make.decode_pool(engine=engine | ({"transfer": both} if both else {}), model=MODEL))

    def mooncake(container: dict) -> str:
        return transfer_of(container)["kv_connector_extra_config"]["mooncake_protocol"]

    assert variables_of(rendered(NIXL))["UCX_TLS"].startswith("tcp,")
    assert mooncake(rendered(MOONCAKE)) == "tcp"
    variables = variables_of(rendered(SGLANG))
    assert (variables["MC_FORCE_TCP"], variables["MOONCAKE_PROTOCOL"]) == ("1", "tcp")
    assert variables_of(rendered(TENSORRT))["UCX_TLS"].startswith("tcp,")
    others = {name: engine for name, engine in ALL.items() if name not in ("vllm-prfaas", "dynamo")}
    fast = {name: rendered(engine, protocol="Rdma") for name, engine in others.items()}
    assert mooncake(fast["vllm-mooncake"]) == "rdma"
    for container in fast.values():
        assert not {"UCX_TLS", "MC_FORCE_TCP", "MOONCAKE_PROTOCOL"} & set(variables_of(container))
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["IPC_LOCK"]}
    assert all("add" not in rendered(engine)["securityContext"]["capabilities"] for engine in ALL.values())


def test_tensorrt_reads_its_cache_transceiver_from_a_file_that_its_command_writes(make):
    engine = TENSORRT | {"transfer": {"extraConfig": {"max_tokens_in_buffer": "2048"}}}
    prefill, decode = (container_of(one) for one in pools(make, engine, parallelism={"tensor": 4, "pipeline": 2}))
    flags = flags_of(prefill)
    assert (flags["--tp_size"], flags["--pp_size"]) == ("4", "2")
    assert flags["--config"] in prefill["command"][2]
    for container in (prefill, decode):
        config = json.loads(variables_of(container)["PRFAAS_ENGINE_CONFIG"])
        assert set(config) <= set(KNOWN["tensorrt-llm"]["config"])
        assert config["cache_transceiver_config"] == {"backend": "UCX", "max_tokens_in_buffer": 2048}
        assert set(config["cache_transceiver_config"]) <= set(KNOWN["tensorrt-llm"]["cache_transceiver"])
        assert config.get("disable_overlap_scheduler", False) is (container is prefill)


@pytest.mark.system
def test_the_written_file_is_what_the_variable_says(make, tmp_path):
    """Run the command as a shell does, with `cat` in the place of trtllm-serve."""
    container = container_of(make.decode_pool(engine=TENSORRT, model=MODEL))
    path = tmp_path / "engine.yaml"
    script = container["command"][2].replace("/tmp/prfaas-engine.yaml", str(path)).replace("trtllm-serve", "echo")
    shown = subprocess.run(
        [*container["command"][:2], script, "x", "serve", "a b"],
        env={"PRFAAS_ENGINE_CONFIG": variables_of(container)["PRFAAS_ENGINE_CONFIG"], "PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        check=True,
    )
    assert shown.stdout == "serve a b\n"
    assert json.loads(path.read_text()) == json.loads(variables_of(container)["PRFAAS_ENGINE_CONFIG"])


def test_what_the_owner_says_of_the_transfer_reaches_the_engine(make):
    extra = {"enable_kv_digest": "true", "backends": '["UCX"]', "note": "as it is", "num": "4"}
    transfer = {"connector": "Nixl", "failurePolicy": "Fail", "extraConfig": extra}
    config = transfer_of(container_of(make.decode_pool(engine=OURS | {"transfer": transfer}, model=MODEL)))
    assert config["kv_load_failure_policy"] == "fail"
    assert config["kv_connector_extra_config"] == {
        "enable_kv_digest": True,
        "backends": ["UCX"],
        "note": "as it is",
        "num": 4,
    }
    ours = OURS | {"transfer": {"extraConfig": {"compression": "lossless", "deep": "[" * 4096}}}
    config = transfer_of(container_of(make.decode_pool(engine=ours, model=MODEL)))
    assert config["kv_connector_extra_config"]["compression"] == "lossless"
    assert config["kv_connector_extra_config"]["deep"] == "[" * 4096


@pytest.mark.parametrize("engine", [OURS, NIXL, SGLANG])
def test_parallelism_becomes_flags_and_a_data_port_for_each_rank(make, engine):
    sizes = {"tensor": 4, "pipeline": 2, "data": 2}
    container = container_of(make.decode_pool(engine=engine, model=MODEL, parallelism=sizes))
    flags = flags_of(container)
    assert {name: flags[f"--{name}-parallel-size"] for name in sizes} == {"tensor": "4", "pipeline": "2", "data": "2"}
    flags_without = flags_of(container_of(make.decode_pool(engine=engine, model=MODEL)))
    assert not {one for one in flags_without if "parallel" in one}
    if engine is OURS:
        ports = ports_of(container)
        assert {ports["data"], *(ports[f"data-{rank}"] for rank in range(1, 16))} == set(range(8001, 8017))
        assert transfer_of(container)["kv_connector_extra_config"]["metrics_port"] == ports["link-metrics"] == 8017
        # Of a dense model vLLM tells a rank of no other data-parallel one, and their figures would be missing.
        assert transfer_of(container)["kv_connector_extra_config"]["movers"] == 16


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


def test_what_the_owner_sets_replaces_what_the_operator_would_set(make):
    template = {
        "env": [
            {"name": "HOME", "value": "/models/home"},
            {"name": "USER", "value": "me"},
            {"name": "VLLM_SSM_CONV_STATE_LAYOUT", "value": "SD"},
            {"name": "UCX_TLS", "value": "rc,cuda_copy"},
        ],
        "volumes": [{"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "16Gi"}}],
        "volumeMounts": [
            {"name": "shm", "mountPath": "/dev/shm/", "readOnly": False},
            {"name": "shm", "mountPath": "/tmp", "readOnly": False},
        ],
    }
    pod = pod_of(make.decode_pool(engine=NIXL, model=MODEL, template=template))
    (container,) = pod["containers"]
    names = [one["name"] for one in container["env"]]
    assert len(set(names)) == len(names)
    assert {one["name"]: one["value"] for one in template["env"]}.items() <= variables_of(container).items()
    assert [one["mountPath"] for one in container["volumeMounts"]] == ["/dev/shm/", "/tmp"]
    assert [one["name"] for one in pod["volumes"]] == ["shm"]


def test_an_owners_python_path_comes_after_our_connector(make):
    template = {"env": [{"name": "PYTHONPATH", "value": "/plugins:/more"}]}
    container = container_of(make.decode_pool(engine=OURS, model=MODEL, template=template))
    assert variables_of(container)["PYTHONPATH"] == "/prfaas-vllm:/plugins:/more"
    assert variables_of(container_of(make.decode_pool(template=template)))["PYTHONPATH"] == "/plugins:/more"


@pytest.mark.parametrize(("name", "engine"), [*ALL.items(), ("prfaas", {})])
def test_the_routing_table_says_by_which_protocol(make, name, engine):
    *prefills, decode = pools(make, engine)
    facts = plan.PolicyFacts(
        make.policy(model="kimi", prefillPools=["offload"][: len(prefills)]),
        {"decode": decode},
        {one.metadata.name: one for one in prefills},
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


def test_reports_two_kinds_of_engine_in_one_policy(make):
    facts = plan.PolicyFacts(
        make.policy(model="kimi", prefillPools=["offload"]),
        {"decode": make.decode_pool(engine=NIXL, model=MODEL)},
        {"offload": make.prefill_pool(engine=SGLANG, model=MODEL)},
        {"eu": make.member()},
    )
    verdict = plan.readiness(facts, plan.routing_table(facts, {}, None), Counts(ready=1))
    assert (verdict.reason, "sglang" in verdict.message) == ("EngineMismatch", True)


@pytest.mark.parametrize("engine", ALL.values(), ids=ALL)
def test_a_rollout_is_not_called_stuck_while_a_model_may_still_load(make, engine):
    spec = pool_deployment.deployment(make.decode_pool(engine=engine, model=MODEL), None)["spec"]
    probe = spec["template"]["spec"]["containers"][0]["startupProbe"]
    assert spec["progressDeadlineSeconds"] > probe["periodSeconds"] * probe["failureThreshold"]


def test_an_upgrade_that_replaces_the_connector_replaces_the_pods_and_the_page_says_so(make):
    wanted = make.decode_pool(engine=OURS, model=MODEL)
    old, new = (pod_of(wanted, terms=StartTerms(f"prfaas/vllm-connector:{version}")) for version in ("1", "2"))
    assert old != new
    page = (Path(__file__).parents[3] / "docs" / "use" / "install.md").read_text()
    upgrade = page.partition("## Upgrade")[2]
    assert "Set `gatewayImage`, `workerImage` and `connectorImage` to the images that run" in upgrade


def test_reports_pools_of_our_connector_with_tensor_sizes_that_do_not_divide(make):
    cases = [(OURS, 8, "NoReadyInstances"), (OURS, 6, "EngineMismatch"), (NIXL, 6, "NoReadyInstances")]
    for engine, tensor, reason in cases:
        facts = plan.PolicyFacts(
            make.policy(model="kimi", prefillPools=["offload"]),
            {"decode": make.decode_pool(engine=engine, model=MODEL, parallelism={"tensor": 4})},
            {"offload": make.prefill_pool(engine=engine, model=MODEL, parallelism={"tensor": tensor})},
            {"eu": make.member()},
        )
        verdict = plan.readiness(facts, plan.routing_table(facts, {}, None), Counts(ready=1))
        assert verdict.reason == reason
        assert reason != "EngineMismatch" or {"6", "4"} <= set(verdict.message.replace(";", "").split())


def test_reports_pools_of_our_connector_with_other_draft_layers(make):
    def args(config: str) -> dict[str, list[str]]:
        return {"args": [f"--speculative-config={config}"]}

    mtp, ngram = args('{"method": "mtp", "num_speculative_tokens": 2}'), args('{"method": "ngram"}')
    cases = [
        (OURS | mtp, OURS, "EngineMismatch"),
        (OURS | mtp, OURS | mtp, "NoReadyInstances"),
        (OURS | ngram, OURS, "NoReadyInstances"),
        (NIXL | mtp, NIXL, "NoReadyInstances"),
    ]
    for decodes, prefills, reason in cases:
        facts = plan.PolicyFacts(
            make.policy(model="kimi", prefillPools=["offload"]),
            {"decode": make.decode_pool(engine=decodes, model=MODEL)},
            {"offload": make.prefill_pool(engine=prefills, model=MODEL)},
            {"eu": make.member()},
        )
        verdict = plan.readiness(facts, plan.routing_table(facts, {}, None), Counts(ready=1))
        assert verdict.reason == reason
        wanted = "PrefillPool offload has draft layers none in --speculative-config and DecodePool decode mtp; "
        assert reason != "EngineMismatch" or verdict.message.startswith(wanted)


def test_reports_emulated_pools_of_which_one_lives_more_slowly(make):
    def emulated(flag: str) -> dict[str, object]:
        return {"type": "emulated", "args": ["--emulate=p", flag]}

    for flag, reason in (("--stretch=4", "EngineMismatch"), ("--stretch=2.0", "NoReadyInstances")):
        facts = plan.PolicyFacts(
            make.policy(model="kimi", prefillPools=["offload"]),
            {"decode": make.decode_pool(engine=emulated("--stretch=2"), model=MODEL)},
            {"offload": make.prefill_pool(engine=emulated(flag), model=MODEL)},
            {"eu": make.member()},
        )
        verdict = plan.readiness(facts, plan.routing_table(facts, {}, None), Counts(ready=1))
        assert verdict.reason == reason
        wanted = "PrefillPool offload has --stretch 4 and DecodePool decode 2: "
        assert reason != "EngineMismatch" or verdict.message.startswith(wanted)


def test_a_gateway_reaches_the_ports_of_others_engines_only_where_there_are_some(make):
    def ports(*engines: str, ranks: int = 1) -> set[int]:
        instances = [
            Instance(name="x", pool="p", cluster="eu", role="prefill", url="http://x", engine=engine, ranks=ranks)
            for engine in engines
        ]
        policy = protection.network_policy(make.policy(), instances)
        return {one["port"] for rule in policy["spec"]["egress"] for one in rule["ports"]}

    assert ports("sglang") - ports("prfaas") == ports("vllm-mooncake") - ports() == {8998, 5557, 5558}
    assert ports("prfaas") - ports() == {8001}, "cache events"
    assert ports("vllm-prfaas", "vllm-nixl") - ports() == {8001, 5557, 5558}
    assert ports("vllm-prfaas", ranks=4) - ports() == set(range(8001, 8005))
    assert ports("vllm-nixl", ranks=4) - ports() == set(range(5557, 5565))
    assert ports("tensorrt-llm", "dynamo") == ports()
