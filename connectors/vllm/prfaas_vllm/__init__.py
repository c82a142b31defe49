"""The KV connector that makes vLLM an engine of prfaas: its hybrid caches cross by prfaas's own transfer.

connector.py   vLLM's interface; passes every call on
scheduling.py  the scheduler's side: which tokens cross, for which requests (no torch, no vLLM)
transfers.py   the worker's side: a rank's transfers, their mover, and what vLLM hears of them
source.py      what a rank gives: which blocks are computed, and copies of them
destination.py what a rank gets: which caches it waits for, and where they land
layout.py      vLLM's cache groups as groups of a manifest
views.py       a layer's tensors by block (no vLLM)
blocks.py      a rank's groups, and copies between their blocks and plain memory (no vLLM)
device.py      an accelerator's streams and its way to host memory (no vLLM)
slices.py      what crosses between a rank and an instance of several ranks, and what its ranks give to each other
events.py      cache events, from the scheduler to the mover
fingerprint.py what tells two models apart
ranks.py       how heads divide among ranks (no torch, no vLLM)
settings.py    the options of kv_connector_extra_config, and what of vLLM's own is refused
capabilities.py what is needed of vLLM, and the versions that were tested (no torch, no vLLM)
definitions.py what modules define, by their sources (no torch, no vLLM)
"""

from prfaas_vllm.capabilities import installed, require_capabilities
from prfaas_vllm.settings import refusals_in_status

# Before anything of vLLM is imported: another version may lack what connector.py asks for.
with refusals_in_status():
    require_capabilities(installed())
