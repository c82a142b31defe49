"""Proves that another engine is four places: a record, a file of calls, a start and a table of queries.

made_up.py adds an engine in these, and in no other. All else follows from the record.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

pytestmark = pytest.mark.system

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def made_up() -> dict[str, Any]:
    """What a process prints in which the made-up engine was added."""
    command = [sys.executable, "-m", "tests.unit.engines.made_up"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_its_pool_is_rendered(made_up):
    template = made_up["render"]["deployment"]["spec"]["template"]
    (container,) = template["spec"]["containers"]
    assert template["metadata"]["labels"]["prfaas.io/engine"] == "made-up"
    assert (container["command"], container["args"]) == (["made-up", "serve"], ["--made-up-port", "8000"])
    assert {"api": 8000, "kv-events": 5557, "notes": 7000}.items() <= {
        port["name"]: port["containerPort"] for port in container["ports"]
    }.items()
    assert "was not run against made-up yet" in made_up["render"]["proof"][2]


def test_a_request_is_served_by_its_calls(made_up):
    requests = made_up["requests"]
    assert made_up["table"]
    assert (requests["prefill"]["made_up_note"], requests["prefill"]["max_tokens"]) == ("keep", 1)
    salt = requests["prefill"]["cache_salt"]
    assert requests["decode"] == {"model": "m", "prompt": "x" * 40_000, "made_up_note": "here", "cache_salt": salt}
    assert requests["client"] == {"text": "served"}


def test_a_client_can_neither_steer_it_nor_use_an_api_that_it_lacks(made_up):
    assert (made_up["requests"]["steered"], made_up["requests"]["not served"]) == (400, 404)


def test_its_metrics_are_asked_for(made_up):
    assert 'made_up_running{cluster=~"hub|eu", pool=~"decode|prefill"}' in made_up["query"]


def test_what_is_not_in_its_record_counts_as_unsafe(made_up):
    assert made_up["conditions"] == {
        "Encrypted": "PlainTransfers",
        "IntegrityChecked": "ChecksumPerRequest",
        "CallersChecked": "ApiAsksNobody",
    }


def test_the_schema_knows_it(made_up):
    for text in made_up["crds"]:
        spec = yaml.safe_load(text)["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
        engine = spec["properties"]["engine"]
        assert engine["properties"]["type"]["enum"][-1] == "made-up"
        assert "dynamo and made-up are experimental" in engine["properties"]["type"]["description"]
        assert any("|made-up-port)" in rule["rule"] for rule in engine["x-kubernetes-validations"])


def test_network_policies_open_its_ports(made_up):
    ports = {port["port"] for rule in made_up["policy"]["spec"]["egress"] for port in rule["ports"]}
    assert {5557, 5558, *range(7000, 7004)} <= ports
    assert yaml.safe_load(made_up["chart"])["made-up"] == {
        "ports": [[7000, 7003], [5557, 5588]],
        "metricsPorts": [[7000, 7003]],
        "metricsPath": "/figures",
    }


def test_the_documents_name_it(made_up):
    page = made_up["pages"]["engines.md"]
    assert "| `made-up` | prefill first; then decode with a note | needs `profile` | a checksum a request" in page
    assert "| `made-up` | 7000 and up: notes; 5557 and up: cache events" in page
