"""Imports the two modules of the package `kubernetes` that we use, without the `__init__` of the packages around them.

Those import a second, synchronous client with requests, urllib3, oauthlib and websocket, which every gateway would hold
in memory and every command would wait for. Decision 017 has the figures.
"""

import sys
from importlib.util import find_spec, module_from_spec

_BEFORE = frozenset(sys.modules)
for _name in ("kubernetes", "kubernetes.aio"):
    if _name not in _BEFORE and (_spec := find_spec(_name)):
        sys.modules[_name] = module_from_spec(_spec)  # It has the package's path, and nothing was executed.
try:
    from kubernetes.aio.client.configuration import Configuration
    from kubernetes.aio.client.rest import RESTClientObject
finally:
    # Another library that imports the package gets all of it.
    for _name in [one for one in sys.modules.keys() - _BEFORE if one.partition(".")[0] == "kubernetes"]:
        del sys.modules[_name]

__all__ = ["Configuration", "RESTClientObject"]
