"""Imports the modules of the package `kubernetes` that we use, without the `__init__` of the packages around them.

Those import a second, synchronous client with requests, urllib3, oauthlib and websocket, which every gateway would hold
in memory and every command would wait for. Our images do not have the API classes that it imports. Decision 017 has the
figures.
"""

import sys
from collections.abc import Generator
from contextlib import contextmanager
from importlib.util import find_spec, module_from_spec


@contextmanager
def _without_init() -> Generator[None]:
    """Let a block import modules below packages that are not executed; another library then gets all of them."""
    before = frozenset(sys.modules)
    for name in ("kubernetes", "kubernetes.aio", "kubernetes.client"):
        if name not in before and (spec := find_spec(name)):
            sys.modules[name] = module_from_spec(spec)  # It has the package's path, and nothing was executed.
    try:
        yield
    finally:
        for name in [one for one in sys.modules.keys() - before if one.partition(".")[0] == "kubernetes"]:
            del sys.modules[name]


with _without_init():
    from kubernetes.aio.client.configuration import Configuration
    from kubernetes.aio.client.rest import RESTClientObject


def needs_no_proxy(server: str, rules: str) -> bool:
    """Return whether rules as in NO_PROXY name a server. It imports urllib3, which few commands need."""
    with _without_init():
        from kubernetes.client.rest import should_bypass_proxies
    return should_bypass_proxies(server, rules)


__all__ = ["Configuration", "RESTClientObject", "needs_no_proxy"]
