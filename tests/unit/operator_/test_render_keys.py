"""Proves that a policy's API keys reach its gateway as files of a mounted Secret, and by no right at an API server."""

import json

import pytest

from prfaas_operator.render import gateway

IMAGE = gateway.GatewayImage("reg/g:1")

KEYS = {"apiKeysSecretRef": {"name": "chat-api-keys"}}


def pod_of(policy) -> dict:
    return gateway.deployment(policy, IMAGE)["spec"]["template"]["spec"]


def test_the_gateway_reads_the_folder_that_the_secret_is_mounted_as_and_the_scheduler_does_not(make):
    pod = pod_of(make.policy(gateway=KEYS))
    (volume,) = [one for one in pod["volumes"] if "secret" in one]
    assert volume["secret"] == {"secretName": "chat-api-keys", "defaultMode": 0o440}
    serving, scheduler = pod["containers"]
    (mount,) = [one for one in serving["volumeMounts"] if one["name"] == volume["name"]]
    assert (mount["readOnly"], "subPath" in mount) == (True, False)
    assert serving["args"][serving["args"].index("--keys-dir") + 1] == mount["mountPath"]
    assert volume["name"] not in json.dumps(scheduler)


@pytest.mark.parametrize("spec", [{}, KEYS])
def test_no_right_to_read_a_secret_comes_with_it(make, spec):
    assert "secrets" not in json.dumps(gateway.role(make.policy(gateway=spec))["rules"])


def test_without_keys_nothing_is_mounted(make):
    pod = pod_of(make.policy())
    assert all("secret" not in volume for volume in pod["volumes"])
    assert "--keys-dir" not in pod["containers"][0]["args"]
