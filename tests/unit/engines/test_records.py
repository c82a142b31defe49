"""Proves that an engine is what its record says: each part has one entry for it, and no other code tests its name."""

import ast
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec
import pytest
from tests.tables import make_instance, make_table

from prfaas.api import DecodePool, PrefillPool, engine
from prfaas.engines import ENGINES, find_engine
from prfaas.errors import ProtocolError
from prfaas.wire.routes import decode, encode
from prfaas_gateway.api import API_ROUTES
from prfaas_gateway.engines import PROTOCOLS
from prfaas_operator.plan.pool_status import check_addressing, engine_proof
from prfaas_operator.render import pool_deployment
from prfaas_operator.render.engines import STARTS

ROOT: Final = Path(__file__).parents[3]
FOLDERS: Final = ("core", "gateway", "operator", "scheduler")
ENTRIES: Final = {
    "core/prfaas/cli/verify/ways.py",
    "core/prfaas/engines.py",
    "gateway/prfaas_gateway/engines/__init__.py",
    "operator/prfaas_operator/render/engines.py",
    "scheduler/prfaas_scheduler/engines.py",
}
"""The only files that name engines: of one of them, what strangers' servers say of themselves."""
NAMES: Final = {*ENGINES, *(one.type for one in ENGINES.values())}
COMMON: Final = {"prfaas", "vllm"}
"""Names that mean other things, too: they count where something is compared with them."""


def named_in(source: str) -> Iterator[str]:
    """Yield the engines that code names: as a value, in what it compares with, and quoted in a rule."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from (name for name in NAMES if f"'{name}'" in node.value)
            if node.value in NAMES - COMMON:
                yield node.value
        yield from (one.value for one in compared_in(node) if isinstance(one, ast.Constant) and one.value in COMMON)


def compared_in(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the parts of a node that something is compared with."""
    match node:
        case ast.Compare():
            yield from ast.walk(node)
        case ast.MatchValue():
            yield node.value
        case ast.Set():
            yield from node.elts
        case ast.Subscript(value=ast.Dict() as table) | ast.Call(func=ast.Attribute(value=ast.Dict() as table)):
            yield from filter(None, table.keys)
        case ast.Call(func=ast.Attribute(value=ast.Name() | ast.Attribute(), attr="startswith")):
            yield from node.args


def test_no_other_code_names_an_engine():
    files = {path.relative_to(ROOT).as_posix(): path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")}
    assert files.keys() >= ENTRIES
    found = {name: set(named_in(path.read_text())) for name, path in files.items() if name not in ENTRIES}
    assert {name: engines for name, engines in found.items() if engines} == {}


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("x.engine == 'prfaas'", ["prfaas"]),
        ("x in {'prfaas', 'sglang'}", ["prfaas", "sglang"]),
        ("A = frozenset({'dynamo'})", ["dynamo"]),
        ("Rule(f\"self.type != 'vllm'\")", ["vllm"]),
        ("match x:\n  case 'vllm': pass", ["vllm"]),
        ("x.engine.startswith('vllm')", ["vllm"]),
        ("A = frozenset({'prfaas'})", ["prfaas"]),
        ("{'prfaas': 1}.get(x)", ["prfaas"]),
        ("namespace = 'prfaas'", []),
    ],
)
def test_finds_a_name(source: str, names: list[str]):
    assert set(named_in(source)) == set(names)


def test_every_engine_has_calls_and_a_start():
    assert ENGINES.keys() == PROTOCOLS.keys() == STARTS.keys()
    assert all(name == one.name for name, one in ENGINES.items())


def test_a_record_names_apis_that_the_gateway_has_and_hands_off_only_what_it_serves():
    for one in ENGINES.values():
        assert one.hand_offs <= one.apis <= API_ROUTES.keys()
        assert one.hand_offs.isdisjoint(one.unsalted_apis), "what another cluster gave would serve everybody"


def test_a_record_does_not_change():
    with pytest.raises(AttributeError):
        ENGINES["sglang"].is_encrypted = True  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize(
    ("type_", "connector", "name"),
    [
        ("prfaas", None, "prfaas"),
        ("emulated", None, "emulated"),
        ("vllm", None, "vllm-prfaas"),
        ("vllm", "Nixl", "vllm-nixl"),
        ("vllm", "Mooncake", "vllm-mooncake"),
        ("sglang", None, "sglang"),
        ("sglang", "Nixl", "sglang"),
    ],
)
def test_type_and_connector_of_a_pool_choose_its_engine(type_: str, connector: str | None, name: str):
    assert find_engine(type_, connector).name == name


def test_what_crosses_between_clusters_is_checked_and_encrypted_by_our_transfer_alone():
    """A matter of security: it is listed here once more."""
    ours = {"prfaas", "emulated", "vllm-prfaas"}
    assert {name for name, one in ENGINES.items() if one.is_encrypted} == ours
    assert {name for name, one in ENGINES.items() if one.checked == "Frame"} == ours
    assert {name for name, one in ENGINES.items() if one.checks_callers} == {"prfaas", "emulated"}
    assert {name for name, one in ENGINES.items() if one.checked == "Request"} == {"sglang"}
    assert {name for name, one in ENGINES.items() if one.steering_fields or one.steering_objects} == ENGINES.keys()


def test_no_engine_serves_what_another_cluster_gave_it_without_a_word_whose_it_is():
    """Likewise."""
    assert {name for name, one in ENGINES.items() if one.knows_origins} == {"prfaas", "emulated"}
    assert {name for name, one in ENGINES.items() if not (one.knows_origins or one.needs_place_salt)} == {"dynamo"}


def test_a_table_with_an_engine_that_is_not_known_is_refused():
    table = make_table(make_instance("d0", engine="vllm-nixl"))
    assert decode(encode(table)) == table
    for name in ("vllm", "vllm-nixl\n", "made-up"):
        unknown = msgspec.structs.replace(table.instances[0], engine=name)
        with pytest.raises(ProtocolError, match="routing table cannot be read"):
            decode(encode(make_table(unknown)))


@pytest.mark.parametrize(
    ("kind", "wanted"), [(PrefillPool, {"type": "prfaas"}), (DecodePool, {"type": "vllm", "image": "v:1"})]
)
def test_a_pools_engine_is_looked_up_once(monkeypatch, kind, wanted):
    asked: list[str] = []

    def find(type_: str, connector: str | None):
        asked.append(type_)
        return find_engine(type_, connector)

    monkeypatch.setattr(engine, "find_engine", find)
    spec = {"model": {"name": "m", "source": "/models/m"}, "engine": wanted}
    pool = kind.model_validate({"metadata": {"name": "p", "uid": "1"}, "spec": spec})
    check_addressing(pool, None)
    pool_deployment.deployment(pool, None)
    engine_proof(pool)
    assert asked == [wanted["type"]]


@pytest.mark.parametrize("chart", ["prfaas", "prfaas-member"])
def test_the_charts_open_the_ports_of_the_records(chart):
    spec = importlib.util.spec_from_file_location("describe", ROOT / "charts/describe.py")
    assert spec
    assert spec.loader
    describe = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(describe)
    text = (ROOT / "charts" / chart / "files/engines.yaml").read_text()
    assert text == describe.engines_file(), "run `make charts`"
