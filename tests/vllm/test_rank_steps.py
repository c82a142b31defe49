"""What one rank tells its mover, step by step, and when vLLM hears that a request's blocks are free."""

import json
import re
from pathlib import Path

import pytest

from .engines import EngineHost

SCRIPT = Path(__file__).with_name("rank_steps.py")


@pytest.fixture(scope="module")
def failures(engine_host: EngineHost) -> dict[str, str]:
    return json.loads(engine_host.run(SCRIPT.name))


@pytest.mark.parametrize("name", re.findall(r"^def (test_\w+)", SCRIPT.read_text(), re.MULTILINE))
def test_in_vllms_environment(failures: dict[str, str], name: str):
    assert failures[name] == ""
