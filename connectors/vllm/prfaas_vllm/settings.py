"""The connector's settings: `kv_connector_extra_config`, and what of vLLM's own it refuses."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, Protocol, get_args

import msgspec

from prfaas.errors import ConfigError
from prfaas.names import WORKER_DATA_PORT
from prfaas.routing.compression import WireCodec
from prfaas.util import MIB

TERMINATION_LOG: Final = Path("/dev/termination-log")
"""A container's file. Kubernetes puts its text into the pod's status, and the operator into the pool's condition."""


class ConnectorSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The keys of `kv_connector_extra_config`; numbers may be written as text, as in a custom resource."""

    host: str = "127.0.0.1"
    """Address of the data port."""
    cluster: str = ""
    tls_dir: str = ""
    """Directory of tls.crt, tls.key and ca.crt; without it transfers are not encrypted."""
    egress_file: str = ""
    egress_mbps: int = 0
    transfer_memory_mib: int = 256
    compression: WireCodec = "auto"
    metrics_port: int = 0
    """Port of the transfers' metrics; 0 is none."""
    movers: int = 0
    """Ranks of the instance, of any kind; 0 takes vLLM's own count. For a dense model vLLM counts those of one
    data-parallel rank, as if the others were none of the instance."""


def read_settings(extra: Mapping[str, Any]) -> ConnectorSettings:
    """Return the settings. Raises ConfigError for an unknown key or a wrong value."""
    codec = extra.get("compression", "auto")
    if codec not in get_args(WireCodec):
        raise ConfigError(
            f"kv_connector_extra_config of PrfaasConnector: compression is {codec!r}, want one of "
            f"{', '.join(get_args(WireCodec))}"
        )
    try:
        return msgspec.convert(dict(extra), ConnectorSettings, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(f"kv_connector_extra_config of PrfaasConnector: {error}") from error


def data_port(configured: int | None, mover: int) -> int:
    """Return the data port of an instance's mover with this number; `configured` is that of the first one."""
    return (configured or WORKER_DATA_PORT) + mover


def require_transfer_memory(part_bytes: int, transfer_memory_mib: int) -> None:
    """Raise ConfigError if transfers may not hold two parts of a cache: one that leaves and one that comes."""
    least_mib = -(-2 * part_bytes // MIB)
    if transfer_memory_mib < least_mib:
        raise ConfigError(
            f"kv_connector_extra_config of PrfaasConnector: transfer_memory_mib is {transfer_memory_mib}, and two "
            f"parts of this model's cache, of {part_bytes:,} bytes each, must fit: set at least {least_mib}"
        )


class EngineParallelism(Protocol):
    """What is used of vLLM's ParallelConfig."""

    pipeline_parallel_size: int
    decode_context_parallel_size: int
    prefill_context_parallel_size: int


def require_parallelism(parallel: EngineParallelism) -> None:
    """Raise ConfigError if no rank of an instance holds whole blocks of all layers."""
    if parallel.pipeline_parallel_size > 1:
        raise ConfigError(
            "PrfaasConnector carries no caches that are split by layers: set parallelism.pipeline to 1, or "
            "engine.transfer.connector Nixl"
        )
    if max(parallel.decode_context_parallel_size, parallel.prefill_context_parallel_size) > 1:
        raise ConfigError(
            "PrfaasConnector carries no caches that are split by tokens: remove --decode-context-parallel-size and "
            "--prefill-context-parallel-size from args, or set engine.transfer.connector Nixl"
        )


def require_states(*, use_replayssm: bool) -> None:
    """Raise ConfigError if vLLM keeps something of a state that is no part of its block."""
    if use_replayssm:
        raise ConfigError(
            "PrfaasConnector does not carry what --use-replayssm keeps beside a state: remove it from args, or set "
            "engine.transfer.connector Nixl"
        )


def require_role(kv_role: str | None) -> None:
    """Raise ConfigError for a role in which vLLM may give blocks away that a batch in flight still writes: with any
    other it does so when memory is short, and a cache would land in them, or leave them."""
    if kv_role != "kv_both":
        raise ConfigError(
            f"kv_role of PrfaasConnector is {kv_role}: set it to kv_both on every instance, whichever side of a "
            "transfer it is"
        )


@contextmanager
def refusals_in_status() -> Iterator[None]:
    """Leave the reason of a refusal to start where Kubernetes looks for it, and not in the log alone."""
    try:
        yield
    except ConfigError as error:
        say_in_status(str(error))
        raise


def say_in_status(text: str) -> None:
    """Leave a text in the status of this container, if it is one of Kubernetes'."""
    if TERMINATION_LOG.exists():
        with suppress(OSError):
            TERMINATION_LOG.write_text(text)
