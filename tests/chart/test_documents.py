"""Proves that what docs/security.md leans on exists: every test that it names, and every file that it points to."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTS = ("docs/security.md", "docs/install.md", "SECURITY.md")
TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")
LINK = re.compile(r"\]\(([^)#]+)\)")
HEADING = re.compile(r"^## (.+)$", re.MULTILINE)
WITHOUT_TESTS = ("With GitOps",)

each_document = pytest.mark.parametrize("document", DOCUMENTS)


def named_tests(text: str) -> list[tuple[str, str]]:
    return TEST.findall(text)


def functions_of(path: str) -> set[str]:
    """Return the names of a test file's tests; a file that is not there has none."""
    file = ROOT / path
    if not file.exists():
        return set()
    tree = ast.parse(file.read_text())
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


@each_document
def test_every_test_that_is_named_exists(document):
    named = named_tests((ROOT / document).read_text())
    missing = [f"{path}::{name}" for path, name in named if name not in functions_of(path)]
    assert not missing


@each_document
def test_every_link_leads_somewhere(document):
    folder = (ROOT / document).parent
    local = [link for link in LINK.findall((ROOT / document).read_text()) if "://" not in link]
    assert [link for link in local if not (folder / link).exists()] == []


def test_every_threat_names_a_test():
    _, *parts = HEADING.split((ROOT / "docs/security.md").read_text())
    threats = dict(zip(parts[::2], parts[1::2], strict=True))
    assert len(threats) > 12
    assert [title for title, text in threats.items() if not named_tests(text) and title not in WITHOUT_TESTS] == []


def test_a_test_that_is_gone_would_be_found():
    here = Path(__file__).relative_to(ROOT).as_posix()
    assert "test_a_test_that_is_gone_would_be_found" in functions_of(here)
    assert "test_that_never_was" not in functions_of(here)
    assert functions_of("tests/no_such_file.py") == set()
