"""The connector's types fit the release of vLLM for GPUs, which no test runs: its interface is the same."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from prfaas_sandbox.progress import progress
from prfaas_sandbox.vllm import checkout_path, ensure_sources

CONNECTOR = Path(__file__).parents[2] / "connectors/vllm/prfaas_vllm"
WRONG = """
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

class Connector(KVConnectorBase_V1):
    def get_num_new_matched_tokens(self, request) -> str:
        return request.no_such_field

print(KVConnectorBase_V1.no_such_method)
"""


def complaints(sources: Path, environment: Path, folder: Path) -> list[str]:
    """What pyright finds in the code below `folder`, which gets its configuration. Modules are looked for in `sources`
    before all others."""
    settings = {
        "extraPaths": [str(sources), *checkout_path().split(":")],
        "venvPath": str(environment.parent),
        "venv": environment.name,
        "pythonVersion": "3.11",
        # Methods have to fit those that they override: that is what an API is.
        "typeCheckingMode": "standard",
    }
    (folder / "pyrightconfig.json").write_text(json.dumps(settings))
    command = [sys.executable, "-m", "pyright", "--project", folder, "--outputjson"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    return [
        f"{Path(one['file']).name}:{one['range']['start']['line'] + 1}: {one['message']}"
        for one in json.loads(done.stdout)["generalDiagnostics"]
        if one["severity"] == "error"
    ]


@pytest.fixture(scope="module")
def found(vllm_python: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What is wrong with the connector, and with a file that is wrong on purpose."""
    with progress() as report:
        sources = ensure_sources(report)
    folder = tmp_path_factory.mktemp("types")
    shutil.copytree(CONNECTOR, folder / CONNECTOR.name)
    (folder / "wrong.py").write_text(WRONG)
    return complaints(sources, vllm_python.parents[1], folder)


def test_the_connectors_types_fit(found: list[str]):
    assert [text for text in found if not text.startswith("wrong.py")] == []


def test_what_does_not_fit_is_found(found: list[str]):
    wrong = [text for text in found if text.startswith("wrong.py")]
    assert [text for text in wrong if "no_such_method" in text]
    assert [text for text in wrong if "get_num_new_matched_tokens" in text]
