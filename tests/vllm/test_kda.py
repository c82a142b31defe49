"""Caches of Kimi Linear and Kimi K3 cross, though nothing here can compute them."""

import json
import os
import subprocess
from pathlib import Path

from prfaas_sandbox.vllm import checkout_path

from .engines import VARIABLES

SCRIPT = Path(__file__).with_name("kda_caches.py")


def test_kda_states_and_mla_pages_cross_into_other_blocks_and_nothing_else_changes(vllm_python: Path):
    found = subprocess.run(
        [vllm_python, SCRIPT],
        env=os.environ | VARIABLES | {"PYTHONPATH": checkout_path()},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert found.returncode == 0, found.stderr[-2000:]
    said = json.loads(found.stdout.splitlines()[-1])
    assert (said["received"], said["failed"]) == (["d"], [])
    assert said["same"] == {"state": True, "pages": [False, True, True, True], "others": False}
    (_, state, state_types), (_, page, page_types) = said["groups"]
    assert state.startswith("MambaSpec")
    assert page == "MLAAttentionSpec 1 heads of 576 bfloat16 64x576 cpu"
    assert (state_types, page_types) == (["bfloat16", "float32"], ["bfloat16"])
