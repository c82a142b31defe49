"""JSON schemas as the engine gets them: with bounds on the spaces between values.

JSON allows any number of spaces anywhere, and a small model that may write them does so until its tokens are spent.
"""

from typing import Any, Final

import msgspec

# What writers of JSON use: none, one, or a new line with its indentation.
_SPACES: Final[dict[str, Any]] = {"x-guidance": {"whitespace_pattern": r"( |\n {0,16})?"}}


def bounded(schema: bytes) -> str:
    """Return a schema with bounded spaces, unless it says itself what it wants of the grammar library.

    What is no object is returned as it is: the check of the grammar says what is wrong with it.
    """
    try:
        parts = msgspec.json.decode(schema, type=dict[str, msgspec.Raw])
    except msgspec.MsgspecError:
        return schema.decode(errors="replace")
    return msgspec.json.encode(_SPACES | parts).decode()
