"""Proves the page of `prfaas plan --html`: whole, loading nothing, and harmless whatever the file's names are."""

from html.parser import HTMLParser
from pathlib import Path

import pytest
import yaml
from tests.unit.capacity.systems import paper_document
from tests.unit.cli.test_plan import FEW_LENGTHS, run

from prfaas.errors import ConfigError

EXAMPLES = Path(__file__).parents[3] / "examples"
VOID = {"meta", "br"}


class Page(HTMLParser):
    """What a browser would make of a page: its tags, what they load, its words, and tags that never end."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.loads: list[str] = []
        self.words: list[str] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.loads += [f"{tag} {name}" for name, _ in attrs if name in {"src", "href", "data"} or name.startswith("on")]
        if tag not in VOID and not (self.get_starttag_text() or "").endswith("/>"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if self.open and self.open[-1] == tag:
            self.open.pop()

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def page_of(folder: Path, document: dict) -> Page:
    source, target = folder / "plan.yaml", folder / "plan.html"
    source.write_text(yaml.safe_dump(document))
    run("-f", str(source), "--html", str(target))
    return Page(target.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def lab(tmp_path_factory) -> Page:
    target = tmp_path_factory.mktemp("lab") / "lab.html"
    run("-f", str(EXAMPLES / "idle-l40s.yaml"), "--html", str(target))
    return Page(target.read_text(encoding="utf-8"))


def test_the_page_is_whole_and_loads_nothing(lab):
    assert lab.open == []
    assert lab.loads == []
    assert not {"script", "img", "link", "iframe", "object"} & set(lab.tags)
    assert "url(" not in "".join(lab.words)


def test_the_page_opens_with_the_verdict_and_has_four_charts(lab):
    words = " ".join("".join(lab.words).split())
    assert words.index("PrfaaS-PD serves 38% more than the hub alone") < words.index("The system")
    assert lab.tags.count("svg") == 4
    for said in ("hub alone", "homogeneous", "naive", "now", "aiconfigurator-core", "Time to the first token"):
        assert said in words


def test_the_page_says_what_was_not_checked(lab, tmp_path):
    page = page_of(tmp_path, paper_document() | {"workload": FEW_LENGTHS})
    assert "Memory was not checked for prfaas, pd" in "".join(page.words)
    assert "was not checked" not in "".join(lab.words)


def test_names_from_the_file_are_words_and_never_tags(tmp_path):
    name = '"><script>alert(1)</script><b onload=x '
    document = paper_document() | {"workload": FEW_LENGTHS}
    document["offloadPools"][0] |= {"name": name, "link": name}
    document["links"][0]["name"] = name
    document["hub"][0]["name"] = f"{name}2"
    page = page_of(tmp_path, document)
    assert "script" not in page.tags
    assert page.loads == []
    assert any(name in one for one in page.words)


def test_a_hub_without_members_has_a_page_too(tmp_path):
    document = paper_document() | {"workload": FEW_LENGTHS, "offloadPools": [], "links": []}
    page = page_of(tmp_path, document)
    assert page.tags.count("svg") == 1
    assert page.open == []


def test_a_page_that_cannot_be_written_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"--html .* cannot be written"):
        run("-f", str(EXAMPLES / "idle-l40s.yaml"), "--html", str(tmp_path / "none" / "page.html"))
