"""The KV connector that makes vLLM an engine of prfaas: its hybrid caches cross by prfaas's own transfer.

connector.py   vLLM's interface; passes every call on
scheduling.py  the scheduler's side: which tokens cross, for which requests (no torch, no vLLM)
transfers.py   the worker's side: pages and states, to and from the mover
layout.py      vLLM's cache groups as groups of a manifest, and copies of their pages
slices.py      what crosses between a rank and an instance of several ranks
shares.py      what several ranks hold alike: each fetches a share, and gives it to the others
fingerprint.py what tells two models apart
ranks.py       how heads divide among ranks (no torch, no vLLM)
settings.py    supported versions and the options of kv_connector_extra_config
"""

from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version

from prfaas_vllm.settings import refusals_in_status, require_supported

# Before anything of vLLM is imported: another version may lack what connector.py asks for.
with suppress(PackageNotFoundError), refusals_in_status():
    require_supported(version("vllm"))
