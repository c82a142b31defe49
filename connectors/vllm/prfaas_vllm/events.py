"""vLLM's cache events, said to the mover of the same rank.

vLLM's own publisher would say the token ids of prompts in clear to everybody who connects. Where events are enabled
with the publisher `null`, nobody would hear of them: there this one takes its place. The mover keeps what it hears and
tells it to gateways inside mutual TLS. vLLM makes its connector before its publisher, so that the connector can choose.
"""

import hashlib
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import msgspec
from vllm.config import VllmConfig
from vllm.distributed.kv_events import EventBatch, EventPublisher, EventPublisherFactory

from prfaas_transfer.events.engine_socket import tell_at
from prfaas_transfer.events.log import BatchLog

NAME: Final = "prfaas"


def events_path(config: VllmConfig) -> str:
    """Return the socket between the scheduler of a data-parallel rank and its mover; empty if vLLM publishes its events
    itself, or has none."""
    wanted, transfer = config.kv_events_config, config.kv_transfer_config
    if wanted is None or not wanted.enable_kv_cache_events or wanted.publisher not in ("null", NAME):
        return ""
    of_rank = f"{transfer.engine_id if transfer else ''} {config.parallel_config.data_parallel_index}"
    # The path of a socket has 107 bytes at most.
    return str(Path(tempfile.gettempdir()) / f"prfaas-{hashlib.sha256(of_rank.encode()).hexdigest()[:24]}")


def publish_by_mover(config: VllmConfig) -> None:
    """Have the scheduler that is about to be made publish by its mover, if nothing else does."""
    path = events_path(config)
    if not path or config.kv_events_config is None:
        return
    with suppress(KeyError):  # another engine of this process did so
        EventPublisherFactory.register_publisher(NAME, MoverPublisher)
    # vLLM's type allows only its own publishers, its factory all that are registered.
    config.kv_events_config.publisher = NAME  # type: ignore[assignment]
    config.kv_events_config.endpoint = path


class MoverPublisher(EventPublisher):
    """Keeps batches, which threads carry to the mover: the scheduler never waits."""

    def __init__(self, data_parallel_rank: int = 0, endpoint: str = "", **_of_zmq: Any):
        super().__init__(data_parallel_rank)
        self._log = BatchLog()
        self._encode = msgspec.msgpack.Encoder().encode
        tell_at(endpoint, self._log)

    def publish(self, events: EventBatch) -> None:
        if events.data_parallel_rank is None:
            events.data_parallel_rank = self._data_parallel_rank
        self._log.append("kv", self._encode(events))

    def shutdown(self) -> None:
        """Do nothing: the threads end with the process."""
