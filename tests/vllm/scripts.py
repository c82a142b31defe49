"""Runs scripts in vLLM's own environment, in a process without an engine: some seconds each."""

import os
import subprocess
from pathlib import Path

from prfaas_sandbox.vllm import checkout_path

from .engines import VARIABLES


def run(python: Path, script: str) -> str:
    """Return the last line that a script of this folder says."""
    found = subprocess.run(
        [python, Path(__file__).with_name(script)],
        env=os.environ | VARIABLES | {"PYTHONPATH": checkout_path()},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert found.returncode == 0, found.stderr[-2000:]
    return found.stdout.splitlines()[-1]
