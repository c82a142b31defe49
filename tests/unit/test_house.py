"""The house keeps its order: small folders, files of one thought, no import circle, one meaning a class name.

CONTRIBUTING.md states these rules. Each exception below names its reason.
"""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Final, NamedTuple

ROOT: Final = Path(__file__).parents[2]
PACKAGES: Final = (
    "core/prfaas",
    "operator/prfaas_operator",
    "gateway/prfaas_gateway",
    "scheduler/prfaas_scheduler",
    "transfer/prfaas_transfer",
    "worker/prfaas_worker",
    "sandbox/prfaas_sandbox",
    "connectors/vllm/prfaas_vllm",
)
MAX_FILES_A_FOLDER: Final = 16
MAX_LINES_A_FILE: Final = 600
SAME_NAME: Final[dict[str, str]] = {}
"""Public names of types that two modules may define, each with the reason."""


class Module(NamedTuple):
    """One source file: its dotted name, its path and its syntax tree."""

    name: str
    path: Path
    tree: ast.Module

    @property
    def package(self) -> str:
        """The package, as a dotted name."""
        return self.name if self.path.name == "__init__.py" else self.name.rpartition(".")[0]


@cache
def modules() -> tuple[Module, ...]:
    found: list[Module] = []
    for package in PACKAGES:
        base = (ROOT / package).parent
        for path in sorted((ROOT / package).rglob("*.py")):
            name = ".".join(path.relative_to(base).with_suffix("").parts).removesuffix(".__init__")
            found.append(Module(name, path, ast.parse(path.read_text())))
    return tuple(found)


def imports_of(module: Module) -> Iterator[tuple[str, str]]:
    """Yield (module, name) for each import of ours, wherever it stands in the file; the name is empty for modules."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:  # `from .` is the room of the file
                room = module.package.rsplit(".", node.level - 1)[0] if node.level > 1 else module.package
                base = f"{room}.{base}".rstrip(".")
            yield from ((base, alias.name) for alias in node.names)


def targets_of(module: Module, names: set[str]) -> set[str]:
    """Return the modules of ours that a module imports."""
    found: set[str] = set()
    for base, name in imports_of(module):
        if f"{base}.{name}" in names:
            found.add(f"{base}.{name}")
        elif base in names:
            found.add(base)
    return found - {module.name}


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Return every group of modules that import each other (Tarjan's strongly connected components)."""
    order: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        order[node] = low[node] = len(order)
        stack.append(node)
        for target in graph[node]:
            if target not in order:
                visit(target)
                low[node] = min(low[node], low[target])
            elif target in stack:
                low[node] = min(low[node], order[target])
        if low[node] == order[node]:
            group = stack[stack.index(node) :]
            del stack[stack.index(node) :]
            if len(group) > 1:
                found.append(sorted(group))

    for node in graph:
        if node not in order:
            visit(node)
    return found


def test_no_folder_holds_more_than_sixteen_files():
    files: dict[Path, int] = defaultdict(int)
    for module in modules():
        files[module.path.parent] += module.path.name != "__init__.py"

    assert {str(one.relative_to(ROOT)): n for one, n in files.items() if n > MAX_FILES_A_FOLDER} == {}


def test_no_file_is_too_long():
    lines = {str(one.path.relative_to(ROOT)): len(one.path.read_text().splitlines()) for one in modules()}

    assert {name: n for name, n in lines.items() if n > MAX_LINES_A_FILE} == {}


def test_every_file_opens_with_what_it_is_for():
    assert [one.name for one in modules() if not ast.get_docstring(one.tree)] == []


def test_no_modules_import_each_other():
    names = {one.name for one in modules()}

    assert circles({one.name: targets_of(one, names) for one in modules()}) == []


def test_finds_a_circle():
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [["a", "b", "c"]]


DECODERS: Final = {"json.loads", "msgspec.json.decode", "msgspec.msgpack.decode"}
"""What raises RecursionError for bytes of a few kilobytes, beside its own errors."""
MALFORMED: Final = re.compile("DecodeError|MsgspecError|ValueError")
NESTED: Final = re.compile("UNREADABLE|RecursionError")


def guards_of(node: ast.AST) -> tuple[list[ast.stmt], str]:
    """Return what a statement guards, and the errors that it catches."""
    if isinstance(node, ast.Try):
        return node.body, " ".join(ast.unparse(one.type) for one in node.handlers if one.type)
    if isinstance(node, ast.With) and (caught := ast.unparse(node.items[0].context_expr)).startswith("suppress("):
        return node.body, caught
    return [], ""


def half_guarded(tree: ast.Module) -> Iterator[int]:
    """Yield the lines of statements that catch what malformed bytes raise, but not what bytes of any nesting do."""
    made = {
        f"{ast.unparse(one.targets[0])}.decode"
        for one in ast.walk(tree)
        if isinstance(one, ast.Assign) and isinstance(one.value, ast.Call) and "Decoder" in ast.unparse(one.value.func)
    }
    for node in ast.walk(tree):
        body, caught = guards_of(node)
        if not MALFORMED.search(caught) or NESTED.search(caught):
            continue
        calls = {ast.unparse(one.func) for part in body for one in ast.walk(part) if isinstance(one, ast.Call)}
        if calls & (DECODERS | made):
            yield node.lineno


def test_whoever_catches_what_malformed_bytes_raise_catches_what_nested_ones_raise():
    """Else another party's answer of a few kilobytes is an internal error, where a torn one is that party's fault."""
    reading = [one for one in modules() if re.search(r"\.decode\(|json\.loads", one.path.read_text())]
    found = [(one.name, line) for one in reading for line in half_guarded(one.tree)]

    assert found == []


def test_finds_a_decoder_that_nested_bytes_pass():
    source = (
        "reader = msgspec.json.Decoder(int)\n"
        "try:\n    reader.decode(b'')\nexcept msgspec.DecodeError:\n    pass\n"
        "try:\n    json.loads('')\nexcept (ValueError, RecursionError):\n    pass\n"
        "with suppress(msgspec.MsgspecError):\n    msgspec.json.decode(b'')\n"
    )
    assert list(half_guarded(ast.parse(source))) == [2, 10]


def bodies_of(node: ast.AST) -> Iterator[ast.stmt]:
    """Yield the statements of a module, also those below `if`, `try` and `with`."""
    for one in ast.iter_child_nodes(node):
        if isinstance(one, ast.stmt):
            yield one
        if isinstance(one, ast.If | ast.Try | ast.With | ast.ExceptHandler):
            yield from bodies_of(one)


def types_of(tree: ast.Module) -> Iterator[str]:
    """Yield the public names of classes and of type aliases: a name in CamelCase that a module binds is a type."""
    for node in bodies_of(tree):
        names: list[str] = []
        if isinstance(node, ast.ClassDef):
            if not node.name.startswith("_"):
                yield node.name
        elif isinstance(node, ast.Assign):
            names = [one.id for one in node.targets if isinstance(one, ast.Name)]
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names = [node.target.id]
        elif type(node).__name__ == "TypeAlias":  # `type A = B`, of Python 3.12
            names = [ast.unparse(node).split()[1]]
        yield from (name for name in names if name[0].isupper() and not name.isupper())


def test_a_public_class_name_has_one_meaning():
    defined: dict[str, list[str]] = defaultdict(list)
    for module in modules():
        for name in types_of(module.tree):
            defined[name].append(module.name)

    assert {name: where for name, where in defined.items() if len(where) > 1 and name not in SAME_NAME} == {}
    assert [name for name in SAME_NAME if len(defined[name]) < 2] == [], "these exceptions are no longer needed"


def uses_of(module: Module, names: set[str]) -> Iterator[tuple[str, str]]:
    """Yield (module, name) for what a module imports from modules of ours, and for what it reads as `module.name`."""
    bound: dict[str, str] = {}
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            bound |= {alias.asname or alias.name: alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            bound |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    yield from imports_of(module)
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name | ast.Attribute):
            owner = bound.get(ast.unparse(node.value), "")
            if owner in names:
                yield owner, node.attr


def undocumented(all_modules: tuple[Module, ...]) -> set[str]:
    """Return the classes and functions without a docstring that a module of another room uses."""
    by_name = {one.name: one for one in all_modules}
    bare: set[str] = set()
    for module in all_modules:
        for base, name in uses_of(module, set(by_name)):
            owner = by_name.get(base)
            if owner is None or owner.package == module.package:
                continue
            for node in owner.tree.body:
                is_definition = isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
                if is_definition and node.name == name and not ast.get_docstring(node):
                    bare.add(f"{base}.{name}")
    return bare


def test_what_other_rooms_use_has_a_docstring():
    """Helpers within a folder need none."""
    assert undocumented(modules()) == set()
