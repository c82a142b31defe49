"""Imports kopf without the synchronous client of the package `kubernetes`.

kopf loads that client wherever it finds it, to take its metadata objects. We give kopf none, and the client would hold
11 MiB and take .3 s of every start. Decision 017 has the figures.
"""

import sys

_is_loaded = "kubernetes" in sys.modules
if not _is_loaded:
    sys.modules["kubernetes"] = None  # type: ignore[assignment]  # its import now fails, which kopf expects
try:
    import kopf
finally:
    if not _is_loaded:
        del sys.modules["kubernetes"]

__all__ = ["kopf"]
