"""prfaas.memory: the limit of a container, as either version of the kernel's control groups says it."""

from pathlib import Path

import pytest

from prfaas.memory import container_limit_bytes


@pytest.mark.parametrize(
    ("file", "content", "limit_bytes"),
    [
        ("memory.max", "4294967296\n", 4 << 30),
        ("memory.max", "max\n", None),
        ("memory/memory.limit_in_bytes", "4294967296\n", 4 << 30),
        ("memory/memory.limit_in_bytes", "9223372036854771712\n", None),
        ("memory/memory.usage_in_bytes", "4294967296\n", None),
    ],
)
def test_a_limit_is_read_from_either_version(tmp_path: Path, file: str, content: str, limit_bytes: int | None):
    path = tmp_path / file
    path.parent.mkdir(exist_ok=True)
    path.write_text(content)
    assert container_limit_bytes(tmp_path) == limit_bytes
