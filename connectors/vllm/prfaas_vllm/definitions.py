"""What modules define, read from their sources: nothing is imported, and nothing of a module is run.

A module that is read is forgotten but for its names: trees of vLLM's largest files have tens of megabytes.
"""

import ast
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final, NamedTuple

MOST_IMPORTS: Final = 8
"""So often a name may be handed on from module to module."""


class Signature(NamedTuple):
    """The parameters of a function in their order, without `self`, `*args` and `**kwargs`; which of them it needs."""

    names: tuple[str, ...]
    required: frozenset[str]


class Class(NamedTuple):
    """A class: the names of its bases, and what its own body and its `__init__` bind; None if that is no function."""

    bases: tuple[str, ...]
    members: dict[str, Signature | None]


Definition = Class | Signature | None


class Module(NamedTuple):
    """What a module defines, and from which module it has its other names."""

    defined: dict[str, Definition]
    imported: dict[str, tuple[str, str]]


class Found(NamedTuple):
    """A definition, and the module in which it stands."""

    module: str
    definition: Definition


class SourceFolder:
    """The packages that lie in a folder."""

    def __init__(self, folder: Path):
        self._folder = folder
        self.modules: dict[str, Module | None] = {}

    def find(self, module: str, name: str) -> Found | None:
        """Return what a module binds to a name, wherever that is defined; None if it binds nothing."""
        for _ in range(MOST_IMPORTS):
            known = self._module(module)
            if known is None:
                return None
            if name in known.defined:
                return Found(module, known.defined[name])
            if name not in known.imported:
                return None
            module, name = known.imported[name]
        return None

    def members(self, found: Found) -> Mapping[str, Signature | None]:
        """Return what a class binds, and what its bases do."""
        if not isinstance(found.definition, Class):
            return {}
        members: dict[str, Signature | None] = {}
        for name in reversed(found.definition.bases):
            base = self.find(found.module, name)
            if base is not None and base.definition is not found.definition:
                members |= self.members(base)
        return members | found.definition.members

    def text(self, module: str) -> str:
        """Return a module's source; empty if there is none."""
        path = self._path(module)
        return path.read_text(encoding="utf-8") if path is not None else ""

    def _module(self, name: str) -> Module | None:
        if name not in self.modules:
            path = self._path(name)
            package = name if path is not None and path.name == "__init__.py" else name.rpartition(".")[0]
            self.modules[name] = None if path is None else _read(ast.parse(self.text(name)), package)
        return self.modules[name]

    def _path(self, module: str) -> Path | None:
        path = self._folder.joinpath(*module.split("."))
        return next((one for one in (path.with_suffix(".py"), path / "__init__.py") if one.is_file()), None)


def _read(tree: ast.Module, package: str) -> Module:
    found = Module({}, {})
    for node in _statements(tree.body):
        if isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: package.count(".") + 2 - node.level] if node.level else []
            module = ".".join(filter(None, [*parents, node.module]))
            found.imported.update({one.asname or one.name: (module, one.name) for one in node.names})
        elif isinstance(node, ast.ClassDef):
            found.defined[node.name] = Class(tuple(filter(None, map(_name, node.bases))), _members(node))
        elif isinstance(node, ast.FunctionDef):
            found.defined[node.name] = _signature(node)
        else:
            found.defined.update(dict.fromkeys(_bound(node)))
    return found


def _members(node: ast.ClassDef) -> dict[str, Signature | None]:
    found: dict[str, Signature | None] = {}
    for one in _statements(node.body):
        if not isinstance(one, ast.FunctionDef):
            found.update(dict.fromkeys(_bound(one)))
            continue
        for part in ast.walk(one) if one.name == "__init__" else ():
            if isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store) and _name(part.value) == "self":
                found.setdefault(part.attr)
        found[one.name] = _signature(one, skip=0 if "staticmethod" in map(_name, one.decorator_list) else 1)
    return found


def _statements(nodes: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """Yield statements, also those below `if` and `try`."""
    for node in nodes:
        yield node
        if isinstance(node, (ast.If, ast.Try, ast.ExceptHandler)):
            yield from _statements(ast.iter_child_nodes(node))


def _bound(node: ast.AST) -> list[str]:
    """Return the names to which a statement gives values or types."""
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [name for name in map(_name, targets) if name]


def _name(node: ast.AST) -> str:
    return node.id if isinstance(node, ast.Name) else ""


def _signature(node: ast.FunctionDef, skip: int = 0) -> Signature:
    """Return a function's parameters without so many first ones: `self`, or the class."""
    plain = [one.arg for one in (*node.args.posonlyargs, *node.args.args)]
    required = plain[skip : len(plain) - len(node.args.defaults)]
    named = [one.arg for one in node.args.kwonlyargs]
    required += [name for name, default in zip(named, node.args.kw_defaults, strict=True) if default is None]
    return Signature((*plain[skip:], *named), frozenset(required))
