"""Where a prefill instance of SGLang, or of vLLM with Mooncake, tells decode instances how to reach its cache."""

from urllib.parse import urlsplit

from prfaas.names import BOOTSTRAP_PORT
from prfaas.wire.routes import Instance


def bootstrap_host(instance: Instance) -> str:
    """Return the instance's host, an IPv6 address in brackets."""
    host = urlsplit(instance.url).hostname or ""
    return f"[{host}]" if ":" in host else host


def bootstrap_url(instance: Instance) -> str:
    """Return the address of its bootstrap server."""
    return f"http://{bootstrap_host(instance)}:{BOOTSTRAP_PORT}"
