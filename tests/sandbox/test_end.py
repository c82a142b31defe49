"""A sandbox leaves nothing behind, however it ends, and needs no rights that an ordinary user lacks.

Each test runs `prfaas sandbox up` as a separate process and looks at the host: processes, interfaces, mounts.
"""

import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.waiting import eventually

from prfaas_sandbox.cache.entries import CACHE_VARIABLE, cache_folder
from prfaas_sandbox.network import LINK
from prfaas_sandbox.tools import ensure_tools

pytestmark = pytest.mark.clusters

UP_SECONDS, GONE_SECONDS = 240, 120
NOBODY = 65534
REPOSITORY = Path(__file__).resolve().parents[2]


@dataclass
class Running:
    """A sandbox that runs as a separate process."""

    process: subprocess.Popen[bytes]
    state: Path

    @property
    def description(self) -> dict:
        return json.loads((self.state / "sandbox.json").read_text())

    def kubectl(self, cluster: str, *arguments: str, stdin: str | None = None) -> str:
        kubectl = ensure_tools(print)["kubectl"]
        command = [kubectl, "--kubeconfig", self.description[cluster]["kubeconfig"], *arguments]
        return subprocess.run(command, input=stdin, capture_output=True, text=True, check=True, timeout=120).stdout

    def run_pod(self, cluster: str) -> None:
        """Start a pod with a volume and a process that only SIGKILL ends."""
        container = {"name": "main", "image": "none", "command": ["sleep", "100000"]}
        container["volumeMounts"] = [{"name": "data", "mountPath": "/data/here"}]
        spec = {"containers": [container], "volumes": [{"name": "data", "emptyDir": {}}]}
        body = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "sleeper"}, "spec": spec}
        self.kubectl(cluster, "apply", "-f", "-", stdin=json.dumps(body))
        self.kubectl(cluster, "wait", "--for=condition=Ready", "pod/sleeper", "--timeout=60s")


def prfaas(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "prfaas.cli.main", "sandbox", *arguments]


@pytest.fixture
def up(tmp_path: Path) -> Iterator[Callable[..., Running]]:
    """Return a function that starts a sandbox and waits until it is ready."""
    started: list[Running] = []

    def start(state: Path = tmp_path / "state", before: tuple[str, ...] = ()) -> Running:
        with (tmp_path / "up.log").open("wb") as log:
            process = subprocess.Popen([*before, *prfaas("up", "--state", str(state))], stdout=log, stderr=log)
        started.append(Running(process, state))
        eventually(
            lambda: (state / "sandbox.json").exists() or process.poll() is not None, "the sandbox is up", UP_SECONDS
        )
        assert process.poll() is None, (tmp_path / "up.log").read_text()
        return started[-1]

    yield start
    for running in started:
        running.process.kill()
        running.process.wait()


def descendants(pid: int) -> set[tuple[int, str]]:
    """Return (pid, start time) of all processes below `pid`, in whatever namespace."""
    parents: dict[int, list[tuple[int, str]]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        parents.setdefault(int(fields[1]), []).append((int(folder.name), fields[19]))
    found: set[tuple[int, str]] = set()
    todo = [pid]
    while todo:
        children = parents.get(todo.pop(), [])
        found.update(children)
        todo.extend(child for child, _ in children)
    return found


def alive(processes: set[tuple[int, str]]) -> set[tuple[int, str]]:
    """Return those of the processes that have not ended; a reused pid is not one of them."""

    def is_alive(pid: int, start_time: str) -> bool:
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return False
        return fields[19] == start_time and fields[0] != "Z"

    return {process for process in processes if is_alive(*process)}


def seen_from_host(state: Path) -> list[str]:
    """Return the link's interfaces and the mounts below the state folder that the host's namespaces hold."""
    links = subprocess.run(["ip", "-o", "link"], capture_output=True, text=True, check=True).stdout
    mounts = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    return [line for line in links.splitlines() if LINK in line] + [path for path in mounts if str(state) in path]


def api_servers(processes: set[tuple[int, str]]) -> list[int]:
    commands = {pid: Path(f"/proc/{pid}/cmdline").read_text().split("\0")[0] for pid, _ in alive(processes)}
    return [pid for pid, command in commands.items() if "kube-apiserver" in command]


def network_namespaces(processes: set[tuple[int, str]]) -> set[str]:
    return {str(Path(f"/proc/{pid}/ns/net").readlink()) for pid, _ in processes}


def assert_nothing_is_left(running: Running, processes: set[tuple[int, str]]) -> None:
    """Wait until all processes of a sandbox have ended; nothing of it is seen from the host then."""
    eventually(lambda: not alive(processes), "all processes have ended", poll=0.1)
    assert seen_from_host(running.state) == []
    assert not any((running.state / "run").iterdir())


# SIGTERM is what `prfaas sandbox down` sends, below; SIGINT, which interrupts a start, has the same handler.
def test_nothing_is_left_when_the_parent_is_killed(up):
    running = up()
    running.run_pod("member")
    processes = descendants(running.process.pid)
    assert len(processes) > 12  # two control planes, Prometheus, agents, the pod
    assert len(network_namespaces(processes)) >= 3  # ours, hub and member: what is checked below is not trivially so
    assert seen_from_host(running.state) == []  # nor while it runs
    running.process.kill()
    running.process.wait(GONE_SECONDS)
    assert_nothing_is_left(running, processes)


def test_nothing_is_left_of_a_start_that_is_interrupted(tmp_path):
    state = tmp_path / "state"
    with (tmp_path / "up.log").open("wb") as log:
        process = subprocess.Popen(prfaas("up", "--state", str(state)), stdout=log, stderr=log)
    eventually(lambda: len(api_servers(descendants(process.pid))) == 2, "both API servers are started", poll=0.1)
    processes = descendants(process.pid)
    assert len(network_namespaces(processes)) >= 3
    process.send_signal(signal.SIGINT)
    process.wait(GONE_SECONDS)
    assert "Traceback" not in (tmp_path / "up.log").read_text()
    assert_nothing_is_left(Running(process, state), processes)


def test_when_a_part_breaks_all_ends_and_the_reason_is_printed(up, tmp_path):
    running = up()
    processes = descendants(running.process.pid)
    servers = api_servers(processes)
    assert len(servers) == 2
    os.kill(servers[0], signal.SIGKILL)
    assert running.process.wait(GONE_SECONDS) == 1
    eventually(lambda: not alive(processes), "all processes have ended", poll=0.1)
    assert "kube-apiserver was killed by signal 9" in (tmp_path / "up.log").read_text()


def test_one_state_folder_holds_one_sandbox_and_the_commands_speak_of_it_and_end_it(up):
    running = up()
    running.run_pod("hub")
    processes = descendants(running.process.pid)
    second = subprocess.run(
        prfaas("up", "--state", str(running.state)), capture_output=True, text=True, timeout=120, check=False
    )
    assert second.returncode == 1
    assert f"runs in {running.state} already (process {running.process.pid})" in second.stderr
    assert run("status", running, "-o", "json")["clusters"]["member"]["state"] == "ready"
    assert subprocess.run(prfaas("link", "7", "--state", str(running.state)), check=True, timeout=120).returncode == 0
    assert run("status", running, "-o", "json")["link_mbps"] == 7
    subprocess.run(prfaas("down", "--state", str(running.state)), check=True, timeout=120)
    assert running.process.wait(GONE_SECONDS) == 0
    assert_nothing_is_left(running, processes)
    status = subprocess.run(
        prfaas("status", "--state", str(running.state)), capture_output=True, text=True, timeout=120, check=False
    )
    assert (status.returncode, "no sandbox runs" in status.stderr) == (1, True)


def run(command: str, running: Running, *arguments: str) -> dict:
    done = subprocess.run(
        prfaas(command, "--state", str(running.state), *arguments),
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return json.loads(done.stdout)


def drop_to_nobody(needed: list[Path], work: Path) -> tuple[str, ...]:
    """Return a command prefix that drops to an unprivileged user, who sees `needed` even where /root is closed to all.

    In its own mount namespace, each folder that only root may enter is covered by one with what is needed of it.
    """
    closed = {parent for path in needed for parent in path.parents if not parent.stat().st_mode & 0o001}
    script, binds = ["set -e"], []
    for number, path in enumerate(needed):
        if closed & set(path.parents):
            held = work / str(number)
            held.mkdir()
            script.append(f"mount --bind {shlex.quote(str(path))} {held}")
            binds.append((held, path))
    script += [f"mount -t tmpfs -o mode=755 tmpfs {shlex.quote(str(path))}" for path in sorted(closed)]
    for held, path in binds:
        script.append(f"mkdir -p {shlex.quote(str(path))}; mount --bind {held} {shlex.quote(str(path))}")
    user = f"setpriv --reuid {NOBODY} --regid {NOBODY} --clear-groups --inh-caps=-all --bounding-set=-all"
    script.append(f'exec {user} env HOME=/tmp {CACHE_VARIABLE}={shlex.quote(str(cache_folder()))} "$@"')
    return ("unshare", "--mount", "sh", "-c", "\n".join(script), "sh")


@pytest.mark.skipif(os.geteuid() != 0, reason="all of these tests run unprivileged already")
def test_an_unprivileged_user_gets_the_same(up, tmp_path):
    forbidden = Path("/proc/sys/user/max_user_namespaces").read_text().strip() == "0"
    if forbidden:
        pytest.skip(
            "THE KERNEL FORBIDS USER NAMESPACES HERE (user.max_user_namespaces=0): unprivileged use is untested"
        )
    ensure_tools(print)
    state = Path("/var/tmp") / f"prfaas-{os.getpid()}"
    state.mkdir()
    os.chown(state, NOBODY, NOBODY)
    needed = [Path(sys.base_prefix), Path(sys.prefix), REPOSITORY, cache_folder()]
    try:
        running = up(state, drop_to_nobody(needed, tmp_path))
        running.run_pod("member")
        processes = descendants(running.process.pid)
        owners = {Path(f"/proc/{pid}").stat().st_uid for pid, _ in processes}
        assert owners == {NOBODY}
        running.process.kill()
        eventually(lambda: not alive(processes), "all processes have ended", poll=0.1)
    finally:
        subprocess.run(["rm", "-r", str(state)], check=True)


def test_where_namespaces_are_refused_one_sentence_says_so(tmp_path):
    """Inside a user namespace that may make no others, unshare fails as it does on a locked-down machine."""
    limit = "echo 0 > /proc/sys/user/max_user_namespaces; echo 0 > /proc/sys/user/max_net_namespaces"
    command = shlex.join(prfaas("up", "--state", str(tmp_path / "state")))
    done = subprocess.run(
        ["unshare", "--user", "--map-root-user", "sh", "-c", f"{limit}; exec {command}"],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.startswith("prfaas: neither root nor user namespaces")
    assert "kind" in done.stderr
    assert len(done.stderr.splitlines()) == 1
