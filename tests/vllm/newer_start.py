"""Runs in vLLM's own environment: the scheduler's side of the connector starts in the vLLM that is there. Prints JSON:
that vLLM's version, and what was logged.

It imports what the connector needs and no more. The configuration has the few fields that are read at the start.
"""

import json
import logging
from types import SimpleNamespace
from typing import Any

import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from prfaas_vllm.connector import PrfaasConnector, log


class Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


log.addHandler(kept := Kept())
transfer = {"kv_connector_extra_config": {}, "kv_role": "kv_both", "kv_load_failure_policy": "recompute"}
sizes = {"pipeline_parallel_size": 1, "decode_context_parallel_size": 1, "prefill_context_parallel_size": 1}
config: Any = SimpleNamespace(
    kv_transfer_config=SimpleNamespace(**transfer),
    parallel_config=SimpleNamespace(**sizes),
    cache_config=SimpleNamespace(use_replayssm=False, block_size=256),
    kv_events_config=None,
)
PrfaasConnector(config, KVConnectorRole.SCHEDULER, SimpleNamespace())  # pyright: ignore[reportArgumentType]
print(json.dumps({"version": vllm.__version__, "logged": kept.lines}))
