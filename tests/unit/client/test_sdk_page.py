"""Proves that every example of docs/use/sdk.md runs as it stands, in order, before a real gateway and a real worker."""

import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.system

PAGE = Path(__file__).parents[3] / "docs" / "use" / "sdk.md"
ADDRESS = "http://gateway:8080"


def test_every_example_runs(endpoint, capsys):
    text = PAGE.read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    assert len(blocks) == text.count("```python")
    names: dict[str, object] = {}
    for block in blocks:
        assert ADDRESS in block or "client" in block
        exec(compile(block.replace(ADDRESS, endpoint), str(PAGE), "exec"), names)
    names["client"].close()
    names["plain"].close()
    assert "local" in capsys.readouterr().out
