"""Runs the kernels' tests in a process of their own, where Triton interprets them: no GPU is needed, and no other test
sees an interpreted Triton. On a machine with a GPU pytest collects kernels/ itself, and this would be the same
again."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

KERNELS = Path(__file__).parent / "kernels"
# Loading torch once more, in a process for the first line alone, would take as long as a tenth of all this.
SCRIPT = """
import sys, prfaas_worker.models.kimi_linear.cuda
if "triton" in sys.modules:
    sys.exit("asking for the package loaded Triton")
import pytest
sys.exit(pytest.main(sys.argv[1:]))
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="the same tests run on this machine's GPU")
def test_the_package_loads_no_triton_and_the_kernels_hold_in_the_interpreter():
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", SCRIPT, "-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", str(KERNELS)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
