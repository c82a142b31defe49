"""A version of vLLM starts if it has what the connector needs: each that was tested, and a newer one, made of the
newest of these.

Nothing is compared but names in vLLM's sources, so most of these tests import none of it.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from prfaas_sandbox.vllm import checkout_path
from prfaas_vllm.capabilities import NEEDS, TESTED, Need, lacks, missing, untested, version_of
from prfaas_vllm.definitions import Class, SourceFolder

from .engines import HOST, VARIABLES
from .versions import NEWEST

BASE = "distributed/kv_transfer/kv_connector/v1/base.py"
SENTENCE = (
    "vLLM 0.34.0 has all that PrfaasConnector needs, but was not tested with it; these were: 0.30, 0.31, 0.32, 0.33"
)
TELL = "from prfaas_vllm.capabilities import tell; tell()"


@pytest.fixture(scope="module")
def folders(vllm_sources: dict[str, Path]) -> dict[str, SourceFolder]:
    return {version: SourceFolder(folder) for version, folder in vllm_sources.items()}


@pytest.fixture(scope="module")
def newer(vllm_sources: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A vLLM 0.34: the newest one's files, but for those of its version."""
    folder = tmp_path_factory.mktemp("newer")
    shutil.copytree(vllm_sources[NEWEST] / "vllm", folder / "vllm", copy_function=os.symlink)
    text = (folder / "vllm/_version.py").read_text()
    replace(folder, "_version.py", text.replace(f"{NEWEST}.0", "0.34.0").replace(NEWEST.replace(".", ", "), "0, 34"))
    (folder / "vllm-0.34.0.dist-info").mkdir()
    (folder / "vllm-0.34.0.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.34.0\n")
    return folder


def replace(folder: Path, name: str, text: str) -> None:
    """Give a file of a copy another text; the original stays."""
    (folder / "vllm" / name).unlink()
    (folder / "vllm" / name).write_text(text)


def environment(folder: Path) -> dict[str, str]:
    return os.environ | VARIABLES | {"PYTHONPATH": f"{folder}:{checkout_path()}", "PYTHONDONTWRITEBYTECODE": "1"}


def python(folder: Path, statement: str) -> "subprocess.CompletedProcess[str]":
    """Run a statement where a vLLM is found, without the packages that it needs."""
    command = [sys.executable, "-c", statement]
    return subprocess.run(command, env=environment(folder), capture_output=True, text=True, timeout=60, check=False)


@pytest.fixture(scope="module")
def starting(newer: Path, vllm_python: Path) -> "Iterator[subprocess.Popen[str]]":
    """The newer vLLM, which starts while other tests run."""
    command = [vllm_python, HOST.with_name("newer_start.py")]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=environment(newer), stdout=pipe, stderr=pipe, text=True) as process:
        yield process
        process.kill()


@pytest.mark.usefixtures("starting")
@pytest.mark.parametrize("version", TESTED)
def test_each_tested_version_has_what_the_connector_needs(folders: dict[str, SourceFolder], version: str):
    assert missing(folders[version]) == []
    assert version_of(folders[version]).startswith(f"{version}.")
    assert untested(version_of(folders[version])) == ""


@pytest.mark.parametrize("version", TESTED)
def test_nothing_of_it_could_be_missing_unnoticed(folders: dict[str, SourceFolder], version: str):
    sources = folders[version]
    for need in NEEDS:
        home, key = home_of(sources, need)
        kept = home.pop(key)
        assert lacks(sources, need).endswith(need.member or need.name), need
        home[key] = kept
    assert missing(sources) == []


def home_of(sources: SourceFolder, need: Need) -> tuple[dict[str, Any], str]:
    """Where what is read of a version holds a name: its module, or the class that binds it."""
    found = sources.find(need.module, need.name)
    assert found is not None
    if not need.member:
        module = sources.modules[found.module]
        assert module is not None
        return module.defined, need.name
    definition = found.definition
    while isinstance(definition, Class) and need.member not in definition.members:
        base = sources.find(found.module, definition.bases[0])
        assert base is not None
        found, definition = base, base.definition
    assert isinstance(definition, Class)
    return definition.members, need.member


def test_a_newer_version_that_lacks_something_is_refused_with_its_name(newer: Path, tmp_path: Path):
    shutil.copytree(newer / "vllm", tmp_path / "vllm", symlinks=True)
    text = (newer / "vllm" / BASE).read_text()
    replace(tmp_path, BASE, text.replace("def on_new_request(", "def on_request(").replace("failed_recving", "failed"))
    refused = python(tmp_path, "import prfaas_vllm.connector")
    assert refused.stderr.splitlines()[-1] == (
        "prfaas.errors.ConfigError: vLLM 0.34.0 lacks what PrfaasConnector needs: "
        "KVConnectorTransferResults.failed_recving, KVConnectorBase_V1.on_new_request. "
        "Use an image with a version that was tested (0.30, 0.31, 0.32, 0.33), or engine.transfer.connector Nixl"
    )


def test_a_newer_version_says_in_its_container_that_nobody_has_tested_it(newer: Path, vllm_sources: dict[str, Path]):
    assert python(newer, TELL).stdout == f"{SENTENCE}\n"
    assert python(vllm_sources[NEWEST], TELL).stdout == ""


def test_a_newer_version_starts_and_warns(starting: "subprocess.Popen[str]"):
    output, errors = starting.communicate(timeout=300)
    assert starting.returncode == 0, errors[-2000:]
    assert json.loads(output.splitlines()[-1]) == {"version": "0.34.0", "logged": [f"prfaas: {SENTENCE}"]}
