"""One word a thing: names and texts use the glossary's words, and none of those that the glossary replaces.

docs/glossary.md is the source: its first table holds the words, its second those that give way, its last section the
ordinary words. Names of files and of public types are made of listed words. Other names avoid those that give way.
"""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Final, NamedTuple

import pytest

from .test_house import types_of

ROOT: Final = Path(__file__).parents[2]
GLOSSARY: Final = ROOT / "docs/glossary.md"
MAX_WORDS: Final = 45
CODE: Final = ("core", "operator", "gateway", "scheduler", "transfer", "worker", "sandbox", "connectors")
TEXTS: Final = (
    *("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "Makefile", "Dockerfile"),
    *("docs", "charts", "crds", "examples", "kind-configs", "gateway/prfaas_gateway/static"),
)
READ: Final = frozenset((".md", ".yaml", ".tpl", ".txt", ".json", ".html", ".js", ".css", ""))
_CAMEL: Final = re.compile(r"[A-Z]+(?=[A-Z][a-z])|[A-Z]?[a-z0-9]+|[A-Z]+")


class Replaced(NamedTuple):
    """A word that gives way, and how far the ban reaches: `text`, `identifiers`, `names` or `whole names`."""

    word: str
    use: str
    scope: str


def rows(heading: str) -> Iterator[list[str]]:
    """Yield the cells of each row of the first table below a heading."""
    section = GLOSSARY.read_text().split(f"{heading}\n", 1)[1].split("\n## ", 1)[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    for line in lines[2:]:
        yield [cell.strip() for cell in line.strip("|").split("|")]


@cache
def replaced() -> tuple[Replaced, ...]:
    found: list[Replaced] = []
    for words, use, scope in rows("## Words that give way"):
        found += [Replaced(word.strip(), use, scope) for word in words.split(",")]
    return tuple(found)


@cache
def sources() -> tuple[Path, ...]:
    return tuple(path for folder in CODE for path in sorted((ROOT / folder).rglob("*.py")) if ".venv" not in path.parts)


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def forms(word: str) -> tuple[str, str, str]:
    """Return a word and its plurals."""
    return word, f"{word}s", f"{word}es"


def parts_of(name: str) -> list[str]:
    """Return the words of a name in snake_case or CamelCase."""
    return [part.lower() for part in _CAMEL.findall(name.replace("PrfaaS", "Prfaas"))]


def banned_in_name(name: str, scopes: frozenset[str] = frozenset({"text", "identifiers", "names"})) -> str | None:
    """Return what is wrong with a module's or a class's name; with fewer scopes, with another name."""
    parts = parts_of(name)
    for one in replaced():
        if one.scope == "whole names":
            if "names" in scopes and len(parts) == 1 and parts[0] in forms(one.word):
                return f"{name}: {one.word} gives way to {one.use}"
        elif one.scope in scopes and not set(forms(one.word)).isdisjoint(parts):
            return f"{name}: {one.word} gives way to {one.use}"
    return None


def banned_in_identifier(name: str) -> str | None:
    """Return what is wrong with the name of anything: a function, a variable, a parameter."""
    return banned_in_name(name, frozenset({"text", "identifiers"}))


def identifiers_of(tree: ast.Module) -> Iterator[str]:
    """Yield every name that a module gives: to definitions, parameters, variables, attributes and imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr
        elif isinstance(node, ast.alias) and node.asname:
            yield node.asname
        elif isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar) and node.name:
            yield node.name


@cache
def ordinary() -> tuple[frozenset[str], frozenset[str]]:
    """Return the ordinary words of the names of files, and those that names of types have besides."""
    section = GLOSSARY.read_text().split("## Ordinary words in names\n", 1)[1]
    _, files, _, types = section.split("\n\n")
    return frozenset(files.split()), frozenset(types.split())


@cache
def known_in_files() -> frozenset[str]:
    terms = {part for cells in rows("# Glossary") for part in cells[0].split()}
    return frozenset(form for word in terms | ordinary()[0] for form in forms(word))


def unknown_in_type(name: str) -> list[str]:
    """Return the words of a type's name that are neither the glossary's nor ordinary; short ones are grammar."""
    known = known_in_files() | {form for word in ordinary()[1] for form in forms(word)}
    return [part for part in parts_of(name) if len(part) > 2 and part not in known]


def banned_in_text(text: str) -> list[str]:
    """Return the replaced words that a text for users holds, also within the names that it speaks of."""
    words = {part for token in re.findall(r"\w+", text) for part in parts_of(token)}
    return [
        f"{form!r} gives way to {one.use}"
        for one in replaced()
        if one.scope == "text"
        for form in forms(one.word)
        if form in words
    ]


def test_the_glossary_is_short():
    words = [cells[0] for cells in rows("# Glossary")]

    assert 20 < len(words) <= MAX_WORDS
    assert len(set(words)) == len(words)


def test_every_scope_is_known():
    assert {one.scope for one in replaced()} == {"text", "identifiers", "names", "whole names"}


def test_no_replaced_word_is_a_word_of_the_glossary():
    assert {one.word for one in replaced()} & {cells[0] for cells in rows("# Glossary")} == set()


def test_modules_and_classes_are_named_by_words_that_hold():
    wrong = {banned_in_name(path.stem) for path in sources()}
    for path in sources():
        for node in tree_of(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                wrong.add(banned_in_name(node.name))

    assert sorted(wrong - {None}, key=str) == []


def test_nothing_is_named_by_a_replaced_word():
    wrong = {
        f"{path.relative_to(ROOT)}: {found}"
        for path in sources()
        for name in identifiers_of(tree_of(path))
        if (found := banned_in_identifier(name))
    }

    assert sorted(wrong) == []


def test_file_names_are_made_of_known_words():
    used = {
        part
        for path in sources()
        for part in path.relative_to(ROOT).with_suffix("").parts[2:]
        for part in part.split("_")
        if part
    }

    assert sorted(used - known_in_files()) == [], "use a word of docs/glossary.md, or add an ordinary one there"
    assert [word for word in sorted(ordinary()[0]) if used.isdisjoint(forms(word))] == [], "no file name uses these"


def test_type_names_are_made_of_known_words():
    names = {name for path in sources() for name in types_of(tree_of(path))}
    used = {part for name in names for part in parts_of(name)}

    wrong = {name: found for name in names if (found := unknown_in_type(name))}
    assert wrong == {}, "use a word of docs/glossary.md, or add an ordinary one there"
    assert [word for word in sorted(ordinary()[1]) if used.isdisjoint(forms(word))] == [], "no type's name uses these"


@pytest.mark.parametrize("name", ["Doom", "Rescuer", "Witness", "Hurry", "Impatient", "Wishes", "Pulse", "LinkDoom"])
def test_a_coined_type_name_would_fail(name):
    assert unknown_in_type(name)
    assert not unknown_in_type("PrefillInstance")


def test_texts_for_users_hold_no_replaced_word():
    pages = [
        page for one in TEXTS for page in ([ROOT / one] if (ROOT / one).is_file() else sorted((ROOT / one).rglob("*")))
    ]
    wrong = {
        str(page.relative_to(ROOT)): banned_in_text(page.read_text())
        for page in pages
        if page.is_file() and page.suffix in READ and page != GLOSSARY
    }

    assert {page: found for page, found in wrong.items() if found} == {}


LETTER: Final = re.compile(r"(?<![\w.`*/=+-])[PD](?:'s)?(?![\w`(*/=&+-]|\. [A-Z]|/)")
"""P or D as the name of an instance; `PD` and formulas are other things."""


def test_pages_call_the_two_ends_of_a_transfer_by_their_words():
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    lines = {f"{page.name}: {line}" for page in pages for line in page.read_text().splitlines() if LETTER.search(line)}

    assert sorted(lines) == []
    assert LETTER.search("D, before the first byte")


def test_strings_in_code_hold_no_replaced_word():
    """Errors, help texts, metric help, log lines and docstrings are strings."""
    wrong: dict[str, list[str]] = {}
    for path in sources():
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and (found := banned_in_text(node.value)):
                wrong.setdefault(str(path.relative_to(ROOT)), []).extend(found)

    assert wrong == {}


def test_comments_hold_no_replaced_word():
    wrong = {
        f"{path.relative_to(ROOT)}: {token.string}"
        for path in sources()
        for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline)
        if token.type == tokenize.COMMENT and banned_in_text(token.string)
    }

    assert sorted(wrong) == []


def test_a_coined_name_and_a_replaced_word_are_found():
    assert banned_in_name("front_door")
    assert banned_in_name("TlsDoor")
    assert banned_in_name("Wishes")
    assert banned_in_name("Line")
    assert not banned_in_name("CommandLine")
    assert banned_in_identifier("doom_if_stalled")
    assert banned_in_identifier("_WISHES")
    assert not banned_in_identifier("others"), "an ordinary word of variables, but no name of a file"
    assert banned_in_text("The takers ask first.")
    assert banned_in_text("prfaas_taker_bytes of a TakerSide")
    assert not banned_in_text("The destination asks first.")


def test_a_name_is_found_wherever_it_is_given():
    source = """
import a as b
def c(d, *e, f=1): g.h = 1
class i: j: int
for k in l: pass
try: pass
except m as n: pass
match o:
    case [p, *q]: pass
"""
    assert set(identifiers_of(ast.parse(source))) == set("bcdefhijknpq")
