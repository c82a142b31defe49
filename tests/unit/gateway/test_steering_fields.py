"""Clients do not steer caches: fields that only the gateway writes into the legs of a request are refused."""

import json
from typing import Any

import pytest

from prfaas.engines import ENGINES
from prfaas.errors import RequestError
from prfaas_gateway.request import STEERING_FIELDS, read_fields

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
        *("backend_instance_id", "prefill_worker_id", "decode_worker_id", "dp_rank", "prefill_dp_rank", "token_data")
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
    with pytest.raises(RequestError, match=f"the field {field} is set by the gateway"):
        read_fields(body(nvext={field: 7}), every=True)


def test_other_arguments_pass():
    assert "nvext" in read_fields(body(nvext={"greed_sampling": True}), every=True)[1]
    assert "vllm_xargs" in read_fields(body(vllm_xargs={"temperature_of_tea": 70}), every=True)[1]
    assert "vllm_xargs" in read_fields(body(vllm_xargs=[1]), every=True)[1]
