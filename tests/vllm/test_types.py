"""The connector's types fit each release of vLLM that it was tested with, most of which no test runs."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from prfaas_sandbox.vllm import checkout_path
from prfaas_vllm.capabilities import TESTED

CONNECTOR = Path(__file__).parents[2] / "connectors/vllm/prfaas_vllm"
WRONG = """
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

class Connector(KVConnectorBase_V1):
    def get_num_new_matched_tokens(self, request) -> str:
        return request.no_such_field

print(KVConnectorBase_V1.no_such_method)
print(KVConnectorBase_V1.get_loaded_kv_cache_group_ids)
"""
ANYTHING = "from typing import Any\n\ndef __getattr__(name: str) -> Any: ...\n"
Found = dict[str, list[str]]


def complaints(sources: dict[str, Path], environment: Path, folder: Path) -> Found:
    """What pyright finds in the connector, and in a file that is wrong on purpose, by vLLM's version.

    One process checks all versions, so that what they share is read once. Of transformers nothing is read, which would
    take longer than all else: the connector does not look into its classes.
    """
    for version, packages in sources.items():
        shutil.copytree(CONNECTOR, folder / version / CONNECTOR.name)
        (folder / version / "wrong.py").write_text(WRONG)
        # Below the root of its version: there its own imports find it, too.
        (folder / version / "vllm").symlink_to(packages / "vllm")
    (folder / "stubs/transformers").mkdir(parents=True)
    (folder / "stubs/transformers/__init__.pyi").write_text(ANYTHING)
    ours = checkout_path().split(":")[:-1]  # without the connector, whose copies are checked
    settings = {
        "include": [f"{version}/{name}" for version in sources for name in (CONNECTOR.name, "wrong.py")],
        "executionEnvironments": [{"root": version, "extraPaths": ours} for version in sources],
        "extraPaths": ours,
        "stubPath": "stubs",
        "venvPath": str(environment.parent),
        "venv": environment.name,
        "pythonVersion": "3.11",
        # Methods have to fit those that they override: that is what an API is.
        "typeCheckingMode": "standard",
    }
    (folder / "pyrightconfig.json").write_text(json.dumps(settings))
    command = [sys.executable, "-m", "pyright", "--project", folder, "--outputjson"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    found: Found = {version: [] for version in sources}
    for one in json.loads(done.stdout)["generalDiagnostics"]:
        if one["severity"] == "error":
            path = Path(one["file"]).relative_to(folder)
            found[path.parts[0]].append(f"{path.name}:{one['range']['start']['line'] + 1}: {one['message']}")
    return found


@pytest.fixture(scope="module")
def found(vllm_python: Path, vllm_sources: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Found:
    return complaints(vllm_sources, vllm_python.parents[1], tmp_path_factory.mktemp("types").resolve())


@pytest.mark.parametrize("version", TESTED)
def test_the_connectors_types_fit(found: Found, version: str):
    assert [text for text in found[version] if not text.startswith("wrong.py")] == []


@pytest.mark.parametrize("version", TESTED)
def test_what_does_not_fit_is_found(found: Found, version: str):
    wrong = [text for text in found[version] if text.startswith("wrong.py")]
    assert [text for text in wrong if "no_such_method" in text]
    assert [text for text in wrong if "get_num_new_matched_tokens" in text]


def test_each_version_is_checked_by_its_own_sources(found: Found):
    without = {version for version, texts in found.items() if any("get_loaded_kv_cache_group_ids" in t for t in texts)}
    assert without == {"0.30", "0.31"}, "vLLM has that method since 0.32"
