"""The process node runs pods as Kubernetes means them: bound by the real scheduler, fed by the real API server."""

import asyncio
import json
from pathlib import Path

import pytest

pytestmark = [pytest.mark.clusters, pytest.mark.asyncio(loop_scope="session")]


async def test_token_of_the_pod_is_accepted_by_its_own_api_server_and_only_there(hub, member):
    ask = """
import json, os, ssl, urllib.error, urllib.request
folder = "/var/run/secrets/kubernetes.io/serviceaccount/"
token = open(folder + "token").read()
for host in (os.environ["KUBERNETES_SERVICE_HOST"], OTHER):
    url = f"https://{host}:{os.environ['KUBERNETES_SERVICE_PORT']}/apis/authentication.k8s.io/v1/selfsubjectreviews"
    own = ssl.create_default_context(cafile=folder + "ca.crt")
    context = own if host != OTHER else ssl._create_unverified_context()
    body = json.dumps({"apiVersion": "authentication.k8s.io/v1", "kind": "SelfSubjectReview"}).encode()
    headers = {"Authorization": "Bearer " + token, "Content-Type": "application/json"}
    try:
        with urllib.request.urlopen(urllib.request.Request(url, body, headers), context=context) as answer:
            print(json.load(answer)["status"]["userInfo"]["username"])
    except urllib.error.HTTPError as error:
        print(error.code)
"""
    for pods, other in ((hub, "10.245.0.1"), (member, "10.244.0.1")):
        shown = await pods.output("who", "python3", "-c", f"OTHER = {other!r}{ask}")
        assert shown.split() == ["system:serviceaccount:default:default", "401"]


async def test_a_crash_restarts_the_container_and_keeps_the_log_of_the_run_before(hub):
    await hub.run("crash", "sh", "-c", "echo run; sleep 0.3; exit 3", spec={"restartPolicy": "Always"})

    async def restarted_twice():
        main = await hub.main("crash")
        return main if main.get("restartCount", 0) >= 2 else None

    main = await hub.eventually(restarted_twice, "two restarts")
    assert main["lastState"]["terminated"]["exitCode"] == 3
    assert "CrashLoopBackOff" in json.dumps(main) or "running" in main["state"]
    assert await hub.kubectl("logs", "crash", "--previous") == "run\n"


async def test_kill_pod_ends_all_its_processes_and_the_node_restarts_it(sandbox, member):
    await member.run("victim", "sh", "-c", "sleep 1000 & exec sleep 1001", spec={"restartPolicy": "Always"})
    await member.ready("victim")
    await sandbox.kill_pod(sandbox.member, "default", "victim")

    async def restarted():
        main = await member.main("victim")
        return main if main.get("restartCount") == 1 and "running" in main["state"] else None

    main = await member.eventually(restarted, "a restart")
    assert main["lastState"]["terminated"]["exitCode"] == 137


async def test_what_is_missing_is_named_and_the_pod_starts_when_it_comes(hub):
    volumes = [{"name": "late", "secret": {"secretName": "late"}}]
    mounts = [{"name": "late", "mountPath": "/etc/late"}]
    await hub.run("early", "cat", "/etc/late/key", spec={"volumes": volumes}, volumeMounts=mounts)

    async def named():
        # Until the node authorizer has seen the pod, the API server says for a moment that the node may not read it.
        message = (await hub.main("early")).get("state", {}).get("waiting", {}).get("message", "")
        return "'late' not found" in message

    await hub.eventually(named, "the missing Secret is named")

    async def reported():
        return "'late' not found" in await hub.kubectl("describe", "pod", "early")

    await hub.eventually(reported, "an Event names it too")
    await hub.kubectl("create", "secret", "generic", "late", "--from-literal=key=value")
    await hub.until("early", "Succeeded")
    assert await hub.kubectl("logs", "early") == "value"


async def test_a_command_that_does_not_exist_is_a_reason_to_wait(hub):
    await hub.run("typo", "pyhton3", spec={"restartPolicy": "Always"})

    async def reason():
        return (await hub.main("typo")).get("state", {}).get("waiting", {}) or None

    async def refused():
        waiting = await reason()
        return waiting if waiting and waiting["reason"] == "RunContainerError" else None

    assert '"pyhton3": executable file not found' in (await hub.eventually(refused, "RunContainerError"))["message"]


async def test_deletion_runs_the_hook_then_signals_then_waits_for_the_end(hub):
    # It ends two seconds late, so that the reader of its log has begun by then.
    trap = "trap 'echo asked; sleep 2; exit 0' TERM; echo started; while :; do sleep 0.05; done"
    hook = {"preStop": {"exec": {"command": ["sh", "-c", "echo hook >> /proc/1/fd/1"]}}}
    await hub.run("polite", "sh", "-c", trap, lifecycle=hook)
    await hub.ready("polite")
    logs = asyncio.create_task(hub.kubectl("logs", "-f", "polite"))
    await asyncio.sleep(0.5)
    await hub.kubectl("delete", "pod", "polite", "--timeout=60s")
    assert (await logs).split() == ["started", "hook", "asked"]


async def test_a_process_that_ignores_the_request_is_killed_after_its_grace(hub):
    await hub.run("stubborn", "sleep", "1000", spec={"terminationGracePeriodSeconds": 1})
    await hub.ready("stubborn")
    started = asyncio.get_running_loop().time()
    await hub.kubectl("delete", "pod", "stubborn", "--timeout=60s")
    assert 1 <= asyncio.get_running_loop().time() - started < 20


async def test_failed_liveness_restarts_and_failed_readiness_does_not(hub):
    failing = {"exec": {"command": ["test", "-e", "/nonexistent"]}, "periodSeconds": 1, "failureThreshold": 1}
    at_once = {"restartPolicy": "Always", "terminationGracePeriodSeconds": 0}
    await hub.run("dead", "sleep", "1000", spec=at_once, livenessProbe=failing)
    await hub.run("busy", "sleep", "1000", spec={"restartPolicy": "Always"}, readinessProbe=failing)

    async def restarted():
        return (await hub.main("dead")).get("restartCount", 0) > 0

    async def has_started():
        return "running" in (await hub.main("busy")).get("state", {})

    await hub.eventually(restarted, "a restart for liveness")
    await hub.eventually(has_started, "the start of the other pod")
    busy = await hub.main("busy")
    assert (busy["ready"], busy["restartCount"]) == (False, 0)


async def test_a_volume_follows_its_configmap(hub):
    def configmap(value: str) -> dict:
        return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "live"}, "data": {"key": value}}

    await hub.apply(configmap("old"))
    wait = "until grep -q new /etc/live/key; do sleep 0.2; done; echo seen"
    volumes, mounts = [{"name": "live", "configMap": {"name": "live"}}], [{"name": "live", "mountPath": "/etc/live"}]
    await hub.run("watcher", "sh", "-c", wait, spec={"volumes": volumes}, volumeMounts=mounts)
    await hub.ready("watcher")
    await hub.apply(configmap("new"))
    await hub.until("watcher", "Succeeded")


async def test_a_pod_sees_its_own_mounts_and_processes_and_the_host_sees_neither(hub):
    volumes, mounts = [{"name": "x", "emptyDir": {}}], [{"name": "x", "mountPath": "/etc/deep/er/x", "readOnly": True}]
    look = "ls -d /etc/deep/er/x /etc/passwd; touch /etc/deep/er/x/y 2>&1 | grep -c Read-only"
    script = f"{look}; ls -d /proc/[0-9]* | wc -l"
    shown = await hub.output("inside", "sh", "-c", script, spec={"volumes": volumes}, volumeMounts=mounts)
    seen = shown.split()
    assert seen[:3] == ["/etc/deep/er/x", "/etc/passwd", "1"]
    assert int(seen[3]) <= 3  # the shell, ls and wc
    assert "/etc/deep" not in Path("/proc/self/mountinfo").read_text()


async def test_only_the_api_server_reads_logs(hub):
    await hub.output("diary", "echo", "private")
    script = """
import http.client, ssl
context = ssl._create_unverified_context()
connection = http.client.HTTPSConnection("10.244.0.1", 10250, context=context)
try:
    connection.request("GET", "/containerLogs/default/diary/main")
    print(connection.getresponse().read())
except OSError:
    print("refused")
"""
    assert await hub.output("snoop", "python3", "-c", script) == "refused\n"
