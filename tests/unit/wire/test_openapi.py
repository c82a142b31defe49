"""Proves that the written OpenAPI documents are those of the types and name only the routes that are served, and
that the page's examples are what the types read.
"""

import json
import re
from pathlib import Path

import msgspec
import pytest

from prfaas.wire import openapi
from prfaas.wire.prefill import PrefillOffer, PrefillRequest

ROOT = Path(__file__).parents[3]
DOCUMENTS = {"gateway": openapi.gateway, "prefill": openapi.prefill}
PAGE = (ROOT / "docs" / "extend" / "prefill-api.md").read_text()


@pytest.mark.parametrize("name", DOCUMENTS)
def test_the_written_document_is_up_to_date(name):
    written = (ROOT / "docs" / "openapi" / f"{name}.json").read_text()
    assert written == json.dumps(DOCUMENTS[name](), indent=2) + "\n", "write it anew from prfaas.wire.openapi"


@pytest.mark.parametrize("name", DOCUMENTS)
def test_every_reference_leads_somewhere_and_every_path_parameter_is_described(name):
    document = DOCUMENTS[name]()
    references = re.findall(r'"\$ref": "#/components/schemas/(\w+)"', json.dumps(document))
    assert references
    assert set(references) <= set(document["components"]["schemas"])
    for path, item in document["paths"].items():
        parts = [item, *(part for part in item.values() if isinstance(part, dict))]
        described = {one["name"] for part in parts for one in part.get("parameters", [])}
        assert set(re.findall(r"{(\w+)}", path)) <= described


def routes(document: dict) -> set[tuple[str, str]]:
    verbs = ("get", "post", "put", "delete")
    return {(verb.upper(), path) for path, item in document["paths"].items() for verb in item if verb in verbs}


def test_the_workers_routes_for_prefills_are_those_of_the_document():
    source = (ROOT / "worker/prfaas_worker/front/server.py").read_text()
    served = {(verb.upper(), path) for verb, path in re.findall(r'web\.(\w+)\("(/v1/pref[^"]*)"', source)}
    assert served == routes(openapi.prefill())


def test_the_gateways_routes_are_those_of_the_document():
    from prfaas_gateway.api import API_ROUTES

    source = (ROOT / "gateway/prfaas_gateway/server.py").read_text()
    served = {("POST", path) for path in API_ROUTES}
    served |= {("GET", re.sub(r":[^}]*", "", path)) for path in re.findall(r'add_get\(\s*"(/v1/[^"]*)"', source)}
    assert served == routes(openapi.gateway())


def test_the_examples_of_the_page_are_read_by_the_types():
    blocks = [block for block in re.findall(r"(?:^    .*\n)+", PAGE, re.MULTILINE) if "{" in block]
    bodies = [re.search(r"{.*}", block, re.DOTALL).group(0) for block in blocks]
    for body, kind in zip(bodies, (PrefillRequest, PrefillOffer), strict=True):
        assert msgspec.json.decode(body, type=kind)
