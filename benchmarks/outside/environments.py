"""The environments of other projects' tools: each of its own list of packages with hashes, in the cache, never in ours.

A list is NAME.lock.txt, made by `make lock` from NAME.in.
"""

import re
from pathlib import Path
from typing import Final

from prfaas_sandbox.cache.install import ensure_environment
from prfaas_sandbox.progress import OnProgress

HERE: Final = Path(__file__).parent
SHOWN: Final = {
    "guidellm": "guidellm, of whose 6 GB torch takes most",
    "aiperf": "aiperf, of 840 MB",
    "kvcache-simulator": "kvcache-simulator",
}


def lock_of(tool: str) -> Path:
    return HERE / f"{tool}.lock.txt"


def version_of(tool: str) -> str:
    """Return the version of a tool that is locked; empty for one that has no list here."""
    lock = lock_of(tool)
    found = re.search(rf"^{re.escape(tool)}==(\S+)", lock.read_text(), re.MULTILINE) if lock.exists() else None
    return found[1] if found else ""


def ensure_tool(tool: str, report: OnProgress) -> Path:
    """Return the folder of a tool's programs, which is installed if needed. Errors as of `ensure_environment`."""
    return ensure_environment(f"outside-{tool}", lock_of(tool), SHOWN[tool], report) / "bin"
