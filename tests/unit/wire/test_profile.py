"""What is no profile is refused by the address that sent it."""

import pytest

from prfaas.errors import ProtocolError
from prfaas.wire.profile import read_profile


@pytest.mark.parametrize("document", [b"", b"[]", b'{"model": "m"}', b"\xff", b'{"model": 5}', b'{"x":' + b"[" * 9999])
def test_what_is_no_profile_is_a_protocol_error(document):
    with pytest.raises(ProtocolError, match="is that a prfaas worker"):
        read_profile(document, "http://192.0.2.1:1")
