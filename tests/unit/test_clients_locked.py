"""The OpenAI clients of tests/clients: the page names the versions that are locked, and the locks name no registry."""

import json
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
CLIENTS = ROOT / "tests" / "clients"
PAGE = ROOT / "docs" / "use" / "gateway.md"


def read_locked() -> set[tuple[str, str]]:
    """Return the clients and their versions, as the page's table has them."""
    python = (CLIENTS / "python" / "requirements.lock.txt").read_text()
    versions = dict(re.findall(r"^([\w-]+)==(\S+)", python, re.MULTILINE))
    node = json.loads((CLIENTS / "node" / "package-lock.json").read_text())["packages"]["node_modules/openai"]
    modules = [(CLIENTS / "go" / name).read_text() for name in ("go.mod", "comments.mod")]
    go = {("openai-go", re.search(r"openai-go/v3 v(\S+)", module)[1]) for module in modules}
    python_clients = {("openai-python", versions["openai"]), ("pydantic-ai", versions["pydantic-ai-slim"])}
    return go | python_clients | {("openai-node", node["version"])}


def test_the_page_names_the_clients_that_are_tested():
    section = PAGE.read_text().partition("## Clients that are tested")[2].partition("\n## ")[0]
    assert set(re.findall(r"^\| ([\w-]+) \| (\d\S*) \|", section, re.MULTILINE)) == read_locked()


def test_the_locks_hold_hashes_and_no_address():
    node = json.loads((CLIENTS / "node" / "package-lock.json").read_text())
    installed = [one for path, one in node["packages"].items() if path]
    assert [one for one in installed if "integrity" not in one or "resolved" in one] == []
    assert "://" not in (CLIENTS / "python" / "requirements.lock.txt").read_text()
