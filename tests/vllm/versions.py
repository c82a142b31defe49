"""vLLM's versions that the connector was tested with: the installed one, and the Python sources of releases for GPUs.

A script that needs no engine runs with two of them, the installed one and the newest. Those sources use the packages of
the installed one's environment.
"""

import json
import os
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

from prfaas_sandbox.progress import progress
from prfaas_sandbox.vllm import checkout_path, ensure_sources
from prfaas_vllm.capabilities import TESTED

from .engines import HOST, VARIABLES, EngineHost, contained

INSTALLED, NEWEST = RUN = ("0.32", "0.33")
"""Of these the scheduler, workers and ranks run, too."""


def sources_of(python: Path) -> dict[str, Path]:
    """Folders with vLLM's sources, by its minor version."""
    (installed,) = python.parents[1].glob("lib/python*/site-packages")
    with progress() as report:
        return {each: installed if each == INSTALLED else ensure_sources(each, report) for each in TESTED}


class Versions(NamedTuple):
    """Folders with the sources of the two versions that run, the installed one first. `metadata` is a folder for what
    the sources lack."""

    python: Path
    folders: dict[str, Path]
    host: EngineHost
    metadata: Path

    def run(self, script: str) -> dict[str, Any]:
        """Return the JSON that a script of this folder says, by version."""
        installed, other = self.folders
        metadata = self.metadata / f"vllm-{other}.0.dist-info/METADATA"
        metadata.parent.mkdir(exist_ok=True)
        metadata.write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {other}.0\n")
        path = ":".join(map(str, (self.metadata, self.folders[other], checkout_path())))
        # What vLLM has found out of a model's class it keeps in a file. If each version replaced the other's, every
        # process would ask the class again, for 10 s.
        found_out = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "vllm" / other
        variables = {"MODEL_FOLDER": str(self.host.model), "PYTHONPATH": path, "VLLM_CACHE_ROOT": str(found_out)}
        quiet = {"PYTHONDONTWRITEBYTECODE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
        with subprocess.Popen(
            [*contained(), self.python, HOST.with_name(script)],
            env=os.environ | VARIABLES | variables | quiet,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as process:
            found = {installed: json.loads(self.host.run(script))}
            output, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors[-2000:]
        return found | {other: json.loads(output.splitlines()[-1])}
