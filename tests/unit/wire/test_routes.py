"""The routing table: equal tables are equal bytes, and those of other versions of this format can still be read."""

import gzip

import msgspec
import pytest
from tests.tables import make_instance, make_table

from prfaas.errors import ProtocolError
from prfaas.wire.routes import decode, encode

TABLE = make_table(make_instance("d0"), ttft_slo_millis=4000)


def test_a_table_is_read_as_it_was_written_and_equal_ones_are_equal_bytes():
    assert decode(encode(TABLE)) == TABLE
    assert encode(decode(encode(TABLE))) == encode(TABLE)


def test_a_table_from_before_slos_has_none_and_one_from_later_is_read_as_far_as_it_is_known():
    document = msgspec.json.decode(gzip.decompress(encode(TABLE)))
    del document["ttft_slo_millis"]
    older = decode(msgspec.json.encode(document))
    assert older == msgspec.structs.replace(TABLE, ttft_slo_millis=None)
    assert decode(msgspec.json.encode(document | {"something_new": {"a": [1]}})) == older


@pytest.mark.parametrize(
    "document", [b"", b"{}", b"\x1f\x8bx", encode(TABLE)[:-9], b"[" * 100_000, b'{"x":' + b"[" * 100_000]
)
def test_damaged_tables_are_refused(document):
    with pytest.raises(ProtocolError, match="routing table cannot be read"):
        decode(document)
