"""Imports the two modules of the package `kubernetes` that we use, without the `__init__` of the packages around them.

Those import a second, synchronous client with requests, urllib3, oauthlib and websocket, which every gateway would hold
in memory and every command would wait for.
"""

import sys
from importlib.util import find_spec, module_from_spec

_LEFT_OUT = [name for name in ("kubernetes", "kubernetes.aio") if name not in sys.modules]
for _name in _LEFT_OUT:
    if _spec := find_spec(_name):
        sys.modules[_name] = module_from_spec(_spec)  # It has the package's path, and nothing was executed.
try:
    from kubernetes.aio.client.configuration import Configuration
    from kubernetes.aio.client.rest import RESTClientObject
finally:
    for _name in _LEFT_OUT:
        sys.modules.pop(_name, None)  # Another library that imports the package gets all of it.

__all__ = ["Configuration", "RESTClientObject"]
