"""Proves that what the documents lean on exists: files and headings that they link to, and tests that they name."""

import ast
import importlib.util
import re
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).parents[2]
FOLDERS_OF_PAGES: Final = ("docs", "charts", "benchmarks")
PAGES: Final = [*ROOT.glob("*.md"), *(page for one in FOLDERS_OF_PAGES for page in (ROOT / one).rglob("*.md"))]
DOCUMENTS: Final = sorted(str(page.relative_to(ROOT)) for page in PAGES)
TEST: Final = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")
LINK: Final = re.compile(r"\]\(([^)\s]+)\)")
HEADING: Final = re.compile(r"^#{1,6} (.+)$", re.MULTILINE)
THREAT: Final = re.compile(r"^## (.+)$", re.MULTILINE)
FENCE: Final = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
WITHOUT_TESTS: Final = ("With GitOps",)
NO_PROTECTION: Final = "**No protection**"
NO_THREATS: Final = ("who-may-do-what", "one-exception-to-the-restricted-standard", "with-gitops")

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


def anchors_of(text: str) -> set[str]:
    """Return the anchors of a page's headings, as code hosts make them."""
    headings = HEADING.findall(FENCE.sub("", text))
    plain = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", one).replace("`", "").lower() for one in headings]
    return {re.sub(r"[^\w\- ]", "", one).strip().replace(" ", "-") for one in plain}


def broken_links(folder: Path, text: str) -> list[str]:
    """Return the local links of a page that lead to no file, or to no heading of one."""
    broken: list[str] = []
    for link in LINK.findall(FENCE.sub("", text)):
        if "://" in link or link.startswith("mailto:"):
            continue
        path, _, anchor = link.partition("#")
        target = folder / path if path else None
        if target is not None and not target.exists():
            broken.append(link)
            continue
        page = text if target is None else target.read_text() if anchor else ""
        if anchor and anchor not in anchors_of(page):
            broken.append(link)
    return broken


@each_document
def test_every_test_that_is_named_exists(document: str):
    named = named_tests((ROOT / document).read_text())
    assert [f"{path}::{name}" for path, name in named if name not in functions_of(path)] == []


@each_document
def test_every_link_leads_somewhere(document: str):
    page = ROOT / document
    assert broken_links(page.parent, page.read_text()) == []


def test_every_page_of_the_documents_is_linked_from_their_index():
    docs = ROOT / "docs"
    index = (docs / "README.md").read_text()
    pages = {page.relative_to(docs).as_posix() for page in docs.rglob("*.md") if page.parent.name != "decisions"}
    pages.remove("README.md")
    assert len(pages) > 15
    assert sorted(page for page in pages if f"]({page})" not in index) == []


def test_every_threat_names_a_test():
    _, *parts = THREAT.split((ROOT / "docs/operate/security.md").read_text())
    threats = dict(zip(parts[::2], parts[1::2], strict=True))
    assert len(threats) > 12
    assert [title for title, text in threats.items() if not named_tests(text) and title not in WITHOUT_TESTS] == []


def limits_of(page: str) -> dict[str, bool]:
    """Return by each threat's anchor whether the page says what has no protection."""
    _, *parts = THREAT.split(page)
    return {
        next(iter(anchors_of(f"# {title}"))): NO_PROTECTION in text
        for title, text in zip(parts[::2], parts[1::2], strict=True)
    }


def test_every_threat_says_what_has_no_protection_and_the_summary_agrees():
    limits = limits_of((ROOT / "docs/operate/security.md").read_text())
    assert sorted(anchor for anchor, is_said in limits.items() if not is_said) == sorted(NO_THREATS)
    _, summary = (ROOT / "SECURITY.md").read_text().split("limits surprise most:\n\n")
    points = summary.split("\n\n")[0].split("\n- ")
    led = [re.findall(r"\(docs/operate/security\.md#([\w-]+)\)", point) for point in points]
    assert len(points) == 4
    assert [point for point, anchors in zip(points, led, strict=True) if not any(map(limits.get, anchors))] == []


def test_finds_a_threat_that_claims_too_much():
    page = f"## A thief comes\n\nA door.\n\n{NO_PROTECTION}: a window.\n\n## A flood comes\n\nA dam.\n"
    assert limits_of(page) == {"a-thief-comes": True, "a-flood-comes": False}


def test_every_attack_is_named_by_the_page_and_has_a_control():
    """An attack that fails proves little while nobody saw it succeed."""
    page = (ROOT / "docs/operate/security.md").read_text()
    files = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tests/attacks").rglob("test_*.py"))
    assert len(files) >= 20
    assert [file for file in files if f"`{file}::test_" not in page] == []
    controls = {file: [one for one in functions_of(file) if one.startswith("test_control_")] for file in files}
    assert [file for file, found in controls.items() if not found] == []
    assert "tests/attacks" in (ROOT / "SECURITY.md").read_text()


def test_security_limits_stand_in_one_place():
    """SECURITY.md once claimed that clients are not authenticated, when they were."""
    text = (ROOT / "SECURITY.md").read_text()
    assert "docs/operate/security.md" in text
    assert "does not authenticate clients" not in text
    assert "Known limits" not in text


def test_the_reference_and_the_tables_of_engines_are_what_the_code_says():
    spec = importlib.util.spec_from_file_location("reference", ROOT / "docs/reference.py")
    assert spec
    assert spec.loader
    reference = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(reference)
    page = reference.page()
    for path, text in reference.pages().items():
        assert path.read_text() == text, f"{path.relative_to(ROOT)} is out of date: run `make reference`"
    rows = ("| `--max-running` | N | `32` |", "| `threshold.mode` | Auto, Priced, Fixed, Disabled | `Auto` |")
    assert all(row in page for row in rows)
    assert "object at 0x" not in page


def test_finds_missing_tests_and_links(tmp_path: Path):
    here = Path(__file__).relative_to(ROOT).as_posix()
    assert "test_finds_missing_tests_and_links" in functions_of(here)
    assert "test_that_never_was" not in functions_of(here)
    assert functions_of("tests/no_such_file.py") == set()
    (tmp_path / "a.md").write_text("# One: `two`\n")
    page = "[a](a.md) [b](a.md#one-two) [c](a.md#three) [d](b.md) [e](https://example.org/x)"
    assert broken_links(tmp_path, page) == ["a.md#three", "b.md"]


NAMED: Final = re.compile(r"\[`([\w.]+)`\]\(([^)\s]+\.py)\)")
UNLINKED: Final = re.compile(r"(?<!\[)`([A-Z]\w*[a-z]\w*(?:\.\w+)?)`")
ROOMS: Final = ("core", "operator", "gateway", "scheduler", "transfer", "worker", "sandbox", "connectors")


def definitions(path: Path) -> set[str]:
    """Return the classes, functions and methods of a file, methods as `Class.method`."""
    found: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            inside = (one for one in node.body if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef))
            found |= {f"{node.name}.{one.name}" for one in inside}
    return found


def missing_names(text: str, folder: Path) -> list[str]:
    """Return the names of a page that are not defined: linked ones in their file, the others in no file of ours."""
    missing = [f"{name} in {path}" for name, path in NAMED.findall(text) if name not in definitions(folder / path)]
    known = set().union(*(definitions(path) for room in ROOMS for path in (ROOT / room).rglob("*.py")))
    return missing + [name for name in UNLINKED.findall(text) if name not in known]


def test_every_name_of_the_architecture_stands_in_its_file():
    page = ROOT / "docs/understand/architecture.md"
    assert len(NAMED.findall(page.read_text())) > 30
    assert missing_names(page.read_text(), page.parent) == []


def test_finds_a_missing_name():
    here = "../gateway/prfaas_gateway/state.py"
    page = f"[`GatewayState.push`]({here}) [`GatewayState.done`]({here}) `HubView.put` `HubView.stash` `LinkSommelier`"
    assert missing_names(page, ROOT / "docs") == [f"GatewayState.done in {here}", "HubView.stash", "LinkSommelier"]


MODULE: Final = re.compile(
    r"(?<![\w./-])(prfaas(?:_(?:operator|gateway|scheduler|worker|sandbox))?)((?:\.[a-z_]+)+)(?![\w/:]|-|\.io)"
)
FOLDERS: Final = {"prfaas": "core"}
TEXTS: Final = (*DOCUMENTS, *(str(path.relative_to(ROOT)) for room in ROOMS for path in (ROOT / room).rglob("*.py")))


def missing_modules(text: str) -> list[str]:
    """Return the dotted names in a text whose second part is a folder of ours and that lead to no module or name."""
    missing: list[str] = []
    for package, rest in MODULE.findall(text):
        folder, *parts = ROOT / FOLDERS.get(package, package.removeprefix("prfaas_")) / package, *rest[1:].split(".")
        if not (folder / parts[0]).is_dir():
            continue
        while len(parts) > 1 and (folder / parts[0]).is_dir():
            folder, *parts = folder / parts[0], *parts[1:]
        own = folder / f"{parts[0]}.py"
        init = folder / "__init__.py"
        if not (own.exists() or (folder / parts[0]).is_dir() or re.search(rf"\b{parts[0]}\b", init.read_text())):
            missing.append(package + rest)
    return missing


def test_every_module_that_a_page_or_a_docstring_names_exists():
    missing = {one: missing_modules((ROOT / one).read_text()) for one in TEXTS}
    assert {one: found for one, found in missing.items() if found} == {}


def test_finds_a_missing_module():
    assert missing_modules("see `prfaas.routing.nowhere`, prfaas.routing.decide.decide and prfaas.io") == [
        "prfaas.routing.nowhere"
    ]
