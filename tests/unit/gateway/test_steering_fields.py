"""Clients do not steer caches: fields that only the gateway writes into the legs of a request are refused."""

import json
from typing import Any

import pytest
from tests.tables import make_instance, make_table

from prfaas.engines import ENGINES
from prfaas.errors import RequestError
from prfaas_gateway.api import API_ROUTES, not_served_by
from prfaas_gateway.request import STEERING_FIELDS, ReadingWay, read_fields, read_salted

PLACE = {"prfaas": {"role": "destination", "host": "169.254.169.254", "port": 80}}


def body(**fields: Any) -> bytes:
    return json.dumps({"model": "tiny", "prompt": "x"} | fields).encode()


def test_no_record_loses_a_field_that_steers():
    """A matter of security: they are listed here once more."""
    assert {
        *("kv_transfer_params", "ec_transfer_params", "disaggregated_params", "prfaas_stream"),
        *("bootstrap_host", "bootstrap_port", "bootstrap_room"),
        *("data_parallel_rank", "routed_dp_rank", "disagg_prefill_dp_rank"),
    } == STEERING_FIELDS
    assert ENGINES["dynamo"].steering_objects["nvext"] == {
        *("backend_instance_id", "prefill_worker_id", "decode_worker_id", "dp_rank", "prefill_dp_rank", "token_data"),
        "cache_salt",
    }


@pytest.mark.parametrize("field", sorted(STEERING_FIELDS))
def test_a_field_that_says_where_a_cache_lies_is_refused_by_name(field: str):
    with pytest.raises(RequestError, match=f"the field {field} is set by the gateway") as refused:
        read_fields(body(**{field: PLACE}), every=True)
    assert refused.value.status == 400


@pytest.mark.parametrize("xargs", [b'{"kv_transfer_params": "x"}', b'{"kv_transfer\\u005fparams": "x"}'])
def test_vllms_own_way_into_the_same_field_is_closed(xargs: bytes):
    with pytest.raises(RequestError, match="kv_transfer_params"):
        read_fields(b'{"model": "tiny", "vllm_xargs": ' + xargs + b"}", every=True)


@pytest.mark.parametrize("field", sorted(ENGINES["dynamo"].steering_objects["nvext"]))
def test_a_client_does_not_choose_among_dynamos_workers(field: str):
    with pytest.raises(RequestError, match=rf"the field nvext\.{field} is set by the gateway"):
        read_fields(body(nvext={field: 7}), every=True)


def test_other_arguments_pass():
    assert "nvext" in read_fields(body(nvext={"greed_sampling": True}), every=True)[1]
    assert "vllm_xargs" in read_fields(body(vllm_xargs={"temperature_of_tea": 70}), every=True)[1]
    assert "vllm_xargs" in read_fields(body(vllm_xargs=[1]), every=True)[1]


# Salts of cached prompts: of engines that look for them elsewhere, or not at all

DYNAMO = ReadingWay(True, lambda sent: f"{sent} of a", frozenset({ENGINES["dynamo"].salt_object}))


def salted(way: ReadingWay, **fields: Any) -> dict[str, Any]:
    model, found, written = read_salted(body(**fields), way)
    assert (model, bytes(found["prompt"])) == ("tiny", b'"x"')
    return json.loads(written)


@pytest.mark.parametrize(
    ("nvext", "wanted"),
    [
        ({}, {"cache_salt": "s of a"}),
        ({"greed_sampling": True}, {"greed_sampling": True, "cache_salt": "s of a"}),
        (None, {"cache_salt": "s of a"}),
        ([1], [1]),
    ],
)
def test_the_salt_is_also_where_dynamo_looks_first(nvext: Any, wanted: Any):
    found = salted(DYNAMO, cache_salt="s", nvext=nvext)
    assert (found["cache_salt"], found["nvext"]) == ("s of a", wanted)
    assert salted(DYNAMO, cache_salt="s")["nvext"] == {"cache_salt": "s of a"}


def test_control_other_engines_get_no_object_of_dynamo():
    assert "nvext" not in salted(DYNAMO._replace(salt_objects=frozenset()))
    assert [one.name for one in ENGINES.values() if one.salt_object] == ["dynamo"]


def test_a_salt_of_the_client_where_dynamo_looks_first_is_refused():
    with pytest.raises(RequestError, match=r"the field nvext\.cache_salt") as refused:
        salted(DYNAMO, nvext={"cache_salt": "s of b"})
    assert refused.value.param == "nvext.cache_salt"


def test_an_api_without_salts_is_not_served_where_each_client_has_a_cache_of_its_own():
    table = make_table(make_instance("d0", engine="tensorrt-llm"), make_instance("d1", engine="vllm-nixl"))
    response, completion = API_ROUTES["/v1/responses"], API_ROUTES["/v1/completions"]
    assert not_served_by(response, table, isolates=True) == {"d0"}
    assert not_served_by(response, table, isolates=False) == set()
    assert not_served_by(completion, table, isolates=True) == {"d0"}
    with pytest.raises(RequestError, match="its requests have no cache_salt") as refused:
        not_served_by(response, make_table(make_instance("d0", engine="tensorrt-llm")), isolates=True)
    assert (refused.value.status, "/v1/chat/completions" in str(refused.value)) == (404, True)
    assert "here, but /v1/chat/completions: its" in str(refused.value)
