"""What an engine drafts tokens with, by its flags: layers that draft have caches, which must be alike on both sides.

Two instances of which one drafts with layers of its own would refuse each other's caches, and each long prompt would be
prefilled twice. So no request is given to both. Flags may leave it open: then the instances find out by themselves.
"""

import json
from collections.abc import Iterable
from itertools import pairwise
from typing import Final

NO_LAYERS: Final = "none"
"""Nothing is drafted, or by n-grams or heads that have no cache."""
OPEN: Final = ""
"""The flags do not say it."""
_WITH_CACHE: Final = frozenset({"mtp", "eagle", "eagle3", "dflash", "dspark", "draft_model"})
_WITHOUT_CACHE: Final = frozenset({"ngram", "ngram_gpu", "suffix", "medusa", "mlp_speculator", "custom_class"})
_OTHER_FLAGS: Final = ("--spec-", "--speculative-", "-sc")
"""Parts and short forms of the flag, in vLLM's command line."""
_FILE_OF_FLAGS: Final = "--config"


def draft_layers(flag: str, words: Iterable[str]) -> str:
    """Return the method whose layers draft, NO_LAYERS or OPEN. `flag` takes the configuration, as JSON; empty for an
    engine whose flags are not known."""
    if not flag:
        return OPEN
    found = NO_LAYERS
    parts = [part for word in words for part in word.split("=", 1)]
    for word, value in pairwise([*parts, ""]):
        name = word.replace("_", "-")
        if name == flag:
            found = _method(value)
        elif name.startswith(_OTHER_FLAGS) or name == _FILE_OF_FLAGS:
            return OPEN
    return found


def drafts_fit(one: str, other: str) -> bool:
    """Return whether caches may cross between instances with these draft layers."""
    return one == other or OPEN in (one, other)


def _method(text: str) -> str:
    try:
        method = json.loads(text).get("method")
    except (ValueError, AttributeError, RecursionError):
        return OPEN
    if not isinstance(method, str):
        return OPEN  # vLLM tells it from the draft model
    if method in _WITHOUT_CACHE:
        return NO_LAYERS
    method = "mtp" if method.endswith("_mtp") else method  # a model's own name of it is taken for the common one
    return method if method in _WITH_CACHE else OPEN
