"""A container's environment and command line follow Kubernetes' rules for references and $(NAME)."""

from pathlib import Path
from typing import Any, cast

import pytest

from prfaas.errors import ConfigError
from prfaas_sandbox.network import HUB
from prfaas_sandbox.node.pod import Node
from prfaas_sandbox.node.variables import ConfigSource, command_line, environment, expand, field, sources

CONFIG, SECRET = ConfigSource("configmaps", "conf"), ConfigSource("secrets", "sec")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("$(A)", "1"),
        ("x$(A)y$(B)", "x1y2"),
        ("$$(A)", "$(A)"),
        ("$$$(A)", "$1"),
        ("$(NOBODY)", "$(NOBODY)"),
        ("$A ${A} $", "$A ${A} $"),
    ],
)
def test_references_expand(text, expected):
    assert expand(text, {"A": "1", "B": "2"}) == expected


def test_a_value_sees_only_what_stands_before_it():
    container = {"env": [{"name": "A", "value": "$(B)"}, {"name": "B", "value": "b"}, {"name": "C", "value": "$(B)"}]}
    assert environment(container, {}, {}, str) == {"A": "$(B)", "B": "b", "C": "b"}


def test_every_source_is_found_and_later_ones_win():
    container = {
        "env": [
            {"name": "C", "valueFrom": {"configMapKeyRef": {"name": "conf", "key": "a"}}},
            {"name": "K", "valueFrom": {"secretKeyRef": {"name": "sec", "key": "k"}}},
            {"name": "NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
            {"name": "PATH", "value": "/own:$(PATH)"},
        ]
    }
    assert sources(container) == {CONFIG, SECRET}
    found = environment(
        container, {"PATH": "/bin"}, {CONFIG: {"a": b"1"}, SECRET: {"k": b"2"}}, lambda path: f"<{path}>"
    )
    assert found == {"PATH": "/own:/bin", "C": "1", "K": "2", "NAME": "<metadata.name>"}


@pytest.mark.parametrize(
    ("reference", "data", "message"),
    [
        ({"secretKeyRef": {"name": "sec", "key": "k"}}, {SECRET: None}, "secrets 'sec' not found"),
        ({"configMapKeyRef": {"name": "conf", "key": "k"}}, {CONFIG: {}}, "has no key 'k'"),
        ({"resourceFieldRef": {"resource": "limits.cpu"}}, {}, "does not know valueFrom resourceFieldRef"),
    ],
)
def test_what_leads_nowhere_is_named(reference, data, message):
    with pytest.raises(ConfigError, match=message):
        environment({"env": [{"name": "X", "valueFrom": reference}]}, {}, data, str)


def test_what_is_optional_may_be_missing():
    reference = {"secretKeyRef": {"name": "sec", "key": "k", "optional": True}}
    container = {"env": [{"name": "X", "valueFrom": reference}]}
    assert environment(container, {}, {SECRET: None}, str) == {}
    assert environment(container, {}, {SECRET: {}}, str) == {}


def test_arguments_follow_the_command_and_an_image_alone_is_refused():
    assert command_line({"name": "c", "command": ["run"], "args": ["$(A)"]}, {"A": "1"}) == ("run", "1")
    with pytest.raises(ConfigError, match="container c has no command"):
        command_line({"name": "c", "args": ["x"]}, {})


def test_fields_of_a_pod():
    pod = {"metadata": {"name": "n", "namespace": "ns", "uid": "u"}, "spec": {"nodeName": "node"}}

    def value(path: str) -> str:
        return field(pod, path, ("10.0.0.2", "10.0.0.1"))

    assert value("status.podIP") == "10.0.0.2"
    assert value("status.hostIP") == "10.0.0.1"
    with pytest.raises(ConfigError, match=r"status.phase"):
        value("status.phase")


def test_containers_see_no_gpu_of_the_machine_unless_they_name_one():
    nothing = cast("Any", None)
    node = Node("n", HUB, 6443, nothing, nothing, Path("run"), Path("logs"))
    base = node.environment("pod")
    assert base["CUDA_VISIBLE_DEVICES"] == ""
    chosen = {"env": [{"name": "CUDA_VISIBLE_DEVICES", "value": "0"}]}
    assert environment(chosen, base, {}, str)["CUDA_VISIBLE_DEVICES"] == "0"
