"""The connector looks in vLLM's sources for all that it uses, and names what is not there."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from prfaas.errors import ConfigError
from prfaas_vllm import settings
from prfaas_vllm.capabilities import (
    NEEDS,
    TESTED,
    Need,
    installed,
    lacks,
    missing,
    require_capabilities,
    tell,
    untested,
    version_of,
)
from prfaas_vllm.definitions import Class, Found, Signature, SourceFolder

ROOT = Path(__file__).parents[3]
CONNECTOR = ROOT / "connectors/vllm/prfaas_vllm"
OURS = {
    "KVConnectorBase_V1": ("connector", "PrfaasConnector"),
    "SupportsHMA": ("connector", "PrfaasConnector"),
    "KVConnectorWorkerMetadata": ("connector", "PrfaasWorkerMetadata"),
    "EventPublisher": ("events", "MoverPublisher"),
}
"""Our classes, by those of vLLM that they extend."""
ONLY_SOMETIMES = {"get_loaded_kv_cache_group_ids"}
"""vLLM asks for it since 0.32. Before, it takes every group for loaded."""
ONLY_A_TYPE = {("vllm.forward_context", "ForwardContext")}

FILES = {
    "public.py": """
from typing import TYPE_CHECKING
from .parts import Spec as Renamed, handed
if TYPE_CHECKING:
    from pkg.parts.inner import Late
try:
    LIMIT = 1
except ImportError:
    from pkg.parts.inner import LIMIT
""",
    "parts/__init__.py": "from .inner import Spec\nfrom ..handed import handed\n",
    "parts/inner.py": """
class Base:
    wide: int
    def __init__(self, size, *, depth=1):
        self.size = size
        self.depth: int = depth
    def grow(self, by): self.later = by
class Spec(Base):
    narrow = 2
    def grow(self, by, most=None): ...
    @classmethod
    def made(cls, size): ...
    @staticmethod
    def bare(size, /, *more, kind, **rest): ...
    @property
    def shape(self): ...
class Late: ...
""",
    "handed.py": "def handed(one, two=2): ...\n",
}


@pytest.fixture
def sources(tmp_path: Path) -> SourceFolder:
    for name, text in FILES.items():
        path = tmp_path / "pkg" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return SourceFolder(tmp_path)


def test_a_name_is_found_wherever_it_is_defined(sources: SourceFolder):
    places = {name: sources.find("pkg.public", name) for name in ("Renamed", "Late", "handed", "LIMIT", "Spec")}
    assert {name: found.module for name, found in places.items() if found} == {
        "Renamed": "pkg.parts.inner",
        "Late": "pkg.parts.inner",
        "handed": "pkg.handed",
        "LIMIT": "pkg.public",
    }
    assert places["Spec"] is None
    assert sources.find("pkg.nowhere", "Spec") is None


def test_a_class_has_what_its_body_and_its_beginning_bind_and_what_its_bases_have(sources: SourceFolder):
    found = sources.find("pkg.parts", "Spec")
    assert found is not None
    assert dict(sources.members(found)) == {
        "wide": None,
        "size": None,
        "depth": None,
        "narrow": None,
        "__init__": Signature(("size", "depth"), frozenset({"size"})),
        "grow": Signature(("by", "most"), frozenset({"by"})),
        "made": Signature(("size",), frozenset({"size"})),
        "bare": Signature(("size", "kind"), frozenset({"size", "kind"})),
        "shape": Signature((), frozenset()),
    }
    assert sources.members(Found("pkg.handed", None)) == {}


@pytest.mark.parametrize(
    ("need", "lacking"),
    [
        (Need("pkg.public", "Renamed", "wide"), ""),
        (Need("pkg.public", "Renamed", "later"), "Renamed.later"),
        (Need("pkg.public", "Spec", "wide"), "pkg.public.Spec"),
        (Need("pkg.gone", "Spec"), "pkg.gone.Spec"),
        (Need("pkg.public", "handed", parameters=("one",)), ""),
        (Need("pkg.public", "handed", parameters=("two",)), "pkg.public.handed(two)"),
        (Need("pkg.public", "handed", parameters=()), "pkg.public.handed()"),
        (Need("pkg.public", "LIMIT", parameters=()), "pkg.public.LIMIT()"),
        (Need("pkg.public", "Renamed", "grow", ("by",)), ""),
        (Need("pkg.public", "Renamed", "grow", ("by",), is_overridden=True), "Renamed.grow(by)"),
        (Need("pkg.public", "Renamed", "grow", ("by", "most"), is_overridden=True), ""),
        (Need("pkg.public", "Renamed", "grow", ("by", "least"), is_overridden=True), "Renamed.grow(by, least)"),
    ],
)
def test_what_is_called_takes_what_it_gets_and_what_is_overridden_gets_no_more(
    sources: SourceFolder, need: Need, lacking: str
):
    assert lacks(sources, need) == lacking


def test_all_that_is_imported_of_vllm_is_looked_for():
    imported = {
        (node.module, one.name)
        for path in CONNECTOR.glob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm"
        for one in node.names
    }
    assert len(imported) > 20
    assert imported - {(need.module, need.name) for need in NEEDS} == ONLY_A_TYPE


def test_every_method_that_vllm_calls_is_looked_for_with_the_parameters_of_ours():
    sources, looked = SourceFolder(CONNECTOR.parent), set[str]()
    for need in (one for one in NEEDS if one.is_overridden):
        module, name = OURS[need.name]
        found = sources.find(f"prfaas_vllm.{module}", name)
        assert found is not None
        assert isinstance(found.definition, Class)
        ours = found.definition.members[need.member]
        assert ours is not None
        assert need.parameters in (None, ours.names), need
        looked |= {need.member} if name == "PrfaasConnector" else set()
    connector = sources.find("prfaas_vllm.connector", "PrfaasConnector")
    assert connector is not None
    assert isinstance(connector.definition, Class)
    methods = {name for name, one in connector.definition.members.items() if one and not name.startswith("_")}
    assert looked - {"__init__"} == methods - ONLY_SOMETIMES


@pytest.mark.parametrize(
    ("version", "is_tested"),
    [("0.30.0", True), ("0.32.0+cpu", True), ("0.33.1", True), ("0.34.0", False), ("0.29.9", False), ("x", False)],
)
def test_a_version_that_nobody_has_tested_is_said(version: str, is_tested: bool):
    words = untested(version)
    assert (words == "") == is_tested
    assert is_tested or words.startswith(f"vLLM {version} has all that PrfaasConnector needs, but was not tested")


def test_a_version_is_what_vllm_itself_says(tmp_path: Path):
    assert version_of(SourceFolder(tmp_path)) == "of an unknown version"
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm/_version.py").write_text("version_tuple: tuple\n\n__version__ = version = '0.34.0rc1+cu130'\n")
    assert version_of(SourceFolder(tmp_path)) == "0.34.0rc1+cu130"


def test_what_is_missing_is_refused_once_each_by_name(tmp_path: Path):
    assert len(missing(SourceFolder(tmp_path))) == len({(need.module, need.name) for need in NEEDS})
    with pytest.raises(ConfigError, match=r"lacks what PrfaasConnector needs: vllm\.config\.VllmConfig, .*Nixl"):
        require_capabilities(SourceFolder(tmp_path))


@pytest.mark.system
def test_a_vllm_that_lacks_something_is_refused_before_an_import_fails_of_it(tmp_path: Path):
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm/__init__.py").touch()
    (tmp_path / "vllm/_version.py").write_text("__version__ = version = '0.34.0'\n")
    found = subprocess.run(
        [sys.executable, "-c", "import prfaas_vllm.connector"],
        env=os.environ | {"PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert "ConfigError: vLLM 0.34.0 lacks what PrfaasConnector needs: vllm.config.VllmConfig, " in found.stderr


def test_a_container_leaves_a_sentence_about_an_untested_version_where_kubernetes_reads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    log = tmp_path / "termination-log"
    log.touch()
    monkeypatch.setattr(settings, "TERMINATION_LOG", log)
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm/__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    for version in ("0.33.0", "0.34.0"):
        (tmp_path / "vllm/_version.py").write_text(f"__version__ = version = '{version}'\n")
        tell()
        assert log.read_text() == untested(version)
    assert installed() is not None


def test_the_page_lists_the_versions_that_were_tested():
    page = (ROOT / "docs/use/engines.md").read_text()
    listed = dict(re.findall(r"^\| (\d\.\d+) \| ([^|]+) \|$", page, re.MULTILINE))
    assert listed == TESTED
