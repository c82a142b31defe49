"""The last N lines of a log are found whatever its size and however it ends."""

import io

import pytest

from prfaas_sandbox.node.agent import tail_offset


@pytest.mark.parametrize("text", [b"", b"a\n", b"a", b"a\nb\nc\n", b"a\nb\nc", b"\n\n\n", b"long line\n\nx\n"])
@pytest.mark.parametrize("lines", [0, 1, 2, 3, 10])
def test_tail_is_what_splitting_gives(text, lines):
    whole = text.splitlines(keepends=True)
    expected = b"".join(whole[len(whole) - lines :] if lines < len(whole) else whole)
    assert text[tail_offset(io.BytesIO(text), lines) :] == expected
