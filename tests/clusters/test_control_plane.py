"""The control planes of the sandbox are real: they authenticate, admit, control, and know nothing of each other."""

import json
import subprocess

import pytest

pytestmark = pytest.mark.clusters


def test_server_reports_the_pinned_version(hub):
    assert json.loads(hub.kubectl("version", "-o", "json"))["serverVersion"]["gitVersion"] == "v1.34.4"


def test_controllers_run(hub):
    hub.kubectl("create", "deployment", "echo", "--image=none", "--replicas=2")
    hub.kubectl("wait", "--for=jsonpath={.status.replicas}=2", "deployment/echo", "--timeout=20s")


def test_clusters_share_nothing(hub, member):
    hub.kubectl("create", "namespace", "only-here")
    with pytest.raises(subprocess.CalledProcessError) as refused:
        member.kubectl("get", "namespace", "only-here")
    assert "NotFound" in refused.value.stderr


async def test_fixture_serves_async_tests_too(hub):
    assert hub.kubectl("get", "--raw", "/readyz") == "ok"
